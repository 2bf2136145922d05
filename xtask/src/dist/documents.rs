//! Documents, and what they link to, laid out as in the sources, so that a link that is right there is right wherever they are unpacked.

use anyhow::Result;

use super::archive::{Entry, below};
use crate::install;

/// Files and directories of the sources that are handed out with the agent.
const SHIPPED: [&str; 9] = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "agent/roomtrace.yaml",
    // The guides begin with it.
    "agent/tests/fixtures/captures/f.pcap",
    "collector-config",
    "dashboards",
    "deploy/manifests/roomtrace.yaml",
    "docs",
];

/// Entries for `root`, which itself is left out: each directory before what is in it.
pub(crate) fn entries(root: &str) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for shipped in SHIPPED {
        let from = install::root().join(shipped);
        let files = if from.is_dir() { below(&from)? } else { vec![(String::new(), from)] };
        for (name, file) in files {
            let path = if name.is_empty() { shipped.to_owned() } else { format!("{shipped}/{name}") };
            for (end, _) in path.match_indices('/') {
                let directory = format!("{root}/{}", &path[..end]);
                if !entries.iter().any(|entry| entry.path == directory) {
                    entries.push(Entry::directory(directory));
                }
            }
            entries.push(Entry::file(format!("{root}/{path}"), file));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::super::archive::Content;
    use super::super::{deb, for_hosts};
    use super::*;

    /// Targets of links in Markdown, blocks of code left out.
    fn links(text: &str) -> Vec<String> {
        let mut links = Vec::new();
        let mut fenced = false;
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
                continue;
            }
            if fenced {
                continue;
            }
            let ends = line.match_indices("](").map(|(at, _)| &line[at + 2..]);
            links.extend(ends.filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
        }
        links
    }

    /// A heading's anchor, as GitHub makes it.
    fn anchor(heading: &str) -> String {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    }

    fn anchors(text: &str) -> Vec<String> {
        text.lines().filter(|line| line.starts_with('#')).map(anchor).collect()
    }

    /// `from`'s directory and a relative path as one path; none where it leads above the root.
    fn resolved(from: &str, link: &str) -> Option<String> {
        let mut parts: Vec<&str> = from.split('/').collect();
        parts.pop();
        for part in link.trim_end_matches('/').split('/') {
            match part {
                "." => {}
                ".." => drop(parts.pop()?),
                part => parts.push(part),
            }
        }
        Some(parts.join("/"))
    }

    /// Links of documents among `entries` that lead to nothing there, and how many lead somewhere.
    fn dead(entries: &[Entry]) -> (Vec<String>, usize) {
        let text = |entry: &Entry| match &entry.content {
            Content::File(from) => std::fs::read_to_string(from).unwrap(),
            Content::Bytes(bytes) => String::from_utf8(bytes.clone()).unwrap(),
            Content::Directory => String::new(),
        };
        let documents: BTreeMap<&str, String> = entries
            .iter()
            .filter(|e| Path::new(&e.path).extension().is_some_and(|e| e == "md"))
            .map(|e| (e.path.as_str(), text(e)))
            .collect();
        let (mut dead, mut live) = (Vec::new(), 0);
        for (path, text) in &documents {
            for link in links(text).into_iter().filter(|link| !link.contains("://")) {
                let (file, part) = link.split_once('#').unwrap_or((&link, ""));
                let target = if file.is_empty() { Some((*path).to_owned()) } else { resolved(path, file) };
                let there = target.is_some_and(|target| {
                    let heading = |text: &String| anchors(text).iter().any(|anchor| anchor == part);
                    entries.iter().any(|e| e.path == target)
                        && (part.is_empty() || documents.get(target.as_str()).is_some_and(heading))
                });
                if there {
                    live += 1;
                } else {
                    dead.push(format!("{path}: {link}"));
                }
            }
        }
        (dead, live)
    }

    #[test]
    fn every_link_of_the_archive_leads_somewhere_in_it() {
        let (dead, live) = dead(&for_hosts("roomtrace-1", Path::new("/")).unwrap());
        assert!(dead.is_empty(), "{dead:#?}");
        assert!(live > 50, "{live}");
    }

    #[test]
    fn every_link_of_the_package_leads_somewhere_in_it() {
        let (dead, live) = dead(&deb::files(Path::new("/")).unwrap());
        assert!(dead.is_empty(), "{dead:#?}");
        assert!(live > 50, "{live}");
    }

    #[test]
    fn dead_links_are_seen() {
        let text = "# A b, `c`\n[x](b.md) [up](../../a.md) [here](#a-b-c) [no](#a-b)\n```\n[x](code.md)\n```\n[out](https://a/b) [dir](d)";
        let entries = [Entry::text("r/a.md", text), Entry::directory("r/d")];
        let (dead, live) = dead(&entries);
        assert_eq!(dead, ["r/a.md: b.md", "r/a.md: ../../a.md", "r/a.md: #a-b"]);
        assert_eq!(live, 2);
    }
}
