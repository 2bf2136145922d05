//! Known upstream reports, matched by class, backend and release.
//!
//! Pure. The reports are data (`known_issues.json`), so that adding one is no change of code. Backend and
//! release come from the shape of the messages: where that leaves a range, the answer may be `unknown`.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::sglang::message::{Backend, Release, Releases};
use crate::verdict::model::{Class, KnownIssue};

/// Back ends of which there are reports.
const ALL: [Backend; 3] = [Backend::Mooncake, Backend::Nixl, Backend::Mori];

const DATA: &str = include_str!("known_issues.json");

/// One report as the data file has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Report {
    url: String,
    /// Pin modes, as in docs/verdicts.md.
    #[allow(dead_code, reason = "for the reader of the file; a test checks it")]
    modes: Vec<String>,
    /// Labels of the classes that it shows as.
    classes: Vec<String>,
    backends: Vec<String>,
    /// First release with it, `null`: always had it.
    from: Option<String>,
    /// First release without it, `null`: not known to be fixed.
    fixed_in: Option<String>,
}

fn reports() -> &'static [Report] {
    static REPORTS: OnceLock<Vec<Report>> = OnceLock::new();
    // The file is part of the program and a test reads it: an unreadable one is an empty one.
    REPORTS.get_or_init(|| serde_json::from_str(DATA).unwrap_or_default())
}

/// `0.5.12` or `0.4.8.post1`.
pub(crate) fn parse(text: &str) -> Option<Release> {
    let mut parts = [0u16; 4];
    for (i, part) in text.split('.').enumerate() {
        let digits = if i == 3 { part.strip_prefix("post")? } else { part };
        *parts.get_mut(i)? = digits.parse().ok()?;
    }
    Some(Release { parts })
}

/// Whether a report applies to an engine whose messages fit `releases`.
fn applies(report: &Report, backend: Option<Backend>, releases: Option<Releases>) -> &'static str {
    // Where it is in all of them the back end need not be known.
    let all = ALL.iter().all(|b| report.backends.iter().any(|r| r == b.label()));
    match backend.filter(|b| *b != Backend::Shared) {
        None if !all => return "unknown",
        Some(b) if !report.backends.iter().any(|r| r == b.label()) => return "no",
        _ => {}
    }
    let Some(releases) = releases else { return "unknown" };
    let from = report.from.as_deref().and_then(parse).unwrap_or(Release::new(0, 0, 0, 0));
    let Some(fixed) = report.fixed_in.as_deref().and_then(parse) else {
        return if releases.min >= from { "yes" } else { "unknown" };
    };
    if releases.max < from || releases.min >= fixed {
        "no"
    } else if releases.min >= from && releases.max < fixed {
        "yes"
    } else {
        "unknown"
    }
}

/// Reports that a verdict of this class may be an instance of. `applies` is `no` where the release rules it
/// out, so that a reader sees that it was thought of.
pub fn known_issues(class: Class, backend: Option<Backend>, releases: Option<Releases>) -> Vec<KnownIssue> {
    reports()
        .iter()
        .filter(|r| r.classes.iter().any(|c| c == class.label()))
        .map(|r| KnownIssue {
            url: r.url.clone(),
            fixed_in: r.fixed_in.clone(),
            applies: applies(r, backend, releases),
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    #[allow(clippy::unnecessary_wraps, reason = "as the callers have it")]
    fn releases(min: (u16, u16), max: (u16, u16)) -> Option<Releases> {
        Some(Releases { min: Release::new(0, min.0, min.1, 0), max: Release::new(0, max.0, max.1, 0) })
    }

    #[test]
    fn the_data_file_is_read_whole() {
        let list: Vec<Report> = serde_json::from_str(DATA).unwrap();
        for r in &list {
            assert!(r.url.starts_with("https://"), "{}", r.url);
            assert!(!r.modes.is_empty() && !r.classes.is_empty() && !r.backends.is_empty(), "{}", r.url);
            for release in r.from.iter().chain(&r.fixed_in) {
                assert!(parse(release).is_some(), "{release}");
            }
        }
        assert_eq!(reports().len(), list.len());
    }

    #[test]
    fn every_class_named_can_be_found() {
        for r in reports() {
            for c in &r.classes {
                assert!(Class::ALL.iter().any(|k| k.label() == c && k.finds()), "{c}");
            }
        }
    }

    #[test]
    fn the_reports_are_those_of_the_docs() {
        let fixed = |mode: &str| {
            let mut of = reports().iter().filter(|r| r.modes.iter().any(|m| m == mode));
            of.next().map(|r| (r.url.rsplit('/').next().unwrap_or_default(), r.fixed_in.as_deref()))
        };
        assert_eq!(fixed("M39"), Some(("28652", Some("0.5.21"))));
        assert_eq!(fixed("M4"), Some(("30352", Some("0.5.16"))));
        assert_eq!(fixed("M6"), Some(("29133", Some("0.5.19"))));
        assert_eq!(fixed("M2"), Some(("v0.5.20", Some("0.5.20"))));
        assert_eq!(fixed("M35"), Some(("25125", Some("0.5.12"))));
        assert_eq!(fixed("M42"), Some(("31075", Some("0.5.16"))));
        assert_eq!(fixed("M41"), Some(("9266", None)));
        // What one record can carry of them.
        for class in Class::ALL {
            assert!(known_issues(class, None, None).len() <= 8, "{}", class.label());
        }
    }

    #[test]
    fn of_an_engine_of_which_nothing_is_known_nothing_is_claimed() {
        let all = known_issues(Class::LocalGhost, None, None);
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|i| i.applies == "unknown"));
        let of = |min, max| {
            let all = known_issues(Class::LocalGhost, Some(Backend::Nixl), releases(min, max));
            all.iter().map(|i| i.applies).collect::<Vec<_>>()
        };
        assert_eq!(of((5, 14), (5, 15)), ["yes", "yes"]);
        assert_eq!(of((5, 17), (5, 20)), ["yes", "no"]);
        assert_eq!(of((5, 15), (5, 21)), ["unknown", "unknown"]);
        assert_eq!(of((5, 21), (5, 23)), ["no", "no"]);
        // One of all back ends needs none to be known.
        let all = known_issues(Class::LocalGhost, None, releases((5, 20), (5, 20)));
        assert_eq!(all.iter().map(|i| i.applies).collect::<Vec<_>>(), ["yes", "no"]);
        // The incident this project began with.
        let incident = known_issues(Class::AbortBeforeEntry, Some(Backend::Nixl), releases((5, 17), (5, 21)));
        assert!(incident.iter().any(|i| i.applies == "yes" && i.fixed_in.as_deref() == Some("0.5.22")));
    }

    #[test]
    fn release_decides() {
        let of = |b, r| known_issues(Class::ReceiverSilent, b, r)[0].applies;
        assert_eq!(of(Some(Backend::Nixl), releases((5, 13), (5, 15))), "yes");
        assert_eq!(of(Some(Backend::Nixl), releases((5, 16), (5, 16))), "no");
        assert_eq!(of(Some(Backend::Nixl), releases((5, 12), (5, 16))), "unknown");
        assert_eq!(of(Some(Backend::Mooncake), releases((5, 13), (5, 15))), "no");
        assert_eq!(of(None, None), "unknown");
        assert_eq!(known_issues(Class::Queued, None, None), []);
    }

    #[test]
    fn releases_are_read() {
        assert_eq!(parse("0.4.8.post1"), Some(Release::new(0, 4, 8, 1)));
        assert_eq!(parse("0.5.12"), Some(Release::new(0, 5, 12, 0)));
        assert_eq!(parse("0.5.x"), None);
        assert_eq!(parse("0.5.1.2.3"), None);
    }
}
