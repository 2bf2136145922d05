//! What pod, namespace and container a container id is, from the names of the kubelet's log files.
//!
//! The kubelet links each container's log as `<pod>_<namespace>_<container>-<container id>.log` in `/var/log/containers` (Kubernetes
//! 1.37, `pkg/kubelet/kuberuntime/legacy.go`). A host knows these names from nothing else that needs no privilege: cgroups
//! have the pod's uid only, and environment and hostname of another container's process are closed to a process without
//! `CAP_SYS_PTRACE`. Only the directory is listed; no link is followed, no log opened.
//!
//! Bounded: [`MAX_NAMES`] containers remembered, [`MAX_LISTED`] entries listed at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::rooms::model::PodName;

/// Containers whose names are remembered at most: as many as there can be engine processes.
const MAX_NAMES: usize = super::MAX_FOUND;

/// Entries of the directory looked at each time; a node runs some hundred containers.
const MAX_LISTED: usize = 16_384;

/// Longest name of a file (`NAME_MAX`); the kubelet cuts the container's name where the whole would be longer.
const LONGEST: usize = 255;

/// Names of containers, as they were found.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// `None`: nobody looks.
    dir: Option<PathBuf>,
    names: BTreeMap<String, PodName>,
    /// It was listed in this look already.
    listed: bool,
}

impl Pods {
    pub(super) fn in_directory(dir: Option<PathBuf>) -> Self {
        Self { dir, ..Self::default() }
    }

    /// A look through the processes begins.
    pub(super) fn begin(&mut self) {
        self.listed = false;
    }

    /// What this container is called. The directory is listed once in a look, and only where a container has no name yet: a name
    /// never changes, but the kubelet writes it a moment after the container has started.
    pub(super) fn name(&mut self, container: &str) -> Option<PodName> {
        if !self.names.contains_key(container) && !self.listed {
            self.listed = true;
            self.list();
        }
        self.names.get(container).cloned()
    }

    fn list(&mut self) {
        // Not there: this host has no kubelet.
        let Some(Ok(entries)) = self.dir.as_ref().map(std::fs::read_dir) else { return };
        self.names.clear();
        let names = entries.take(MAX_LISTED).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        self.names.extend(names.filter_map(|name| parse(&name)).take(MAX_NAMES));
    }
}

/// Container id and names in the name of a log file.
fn parse(file: &str) -> Option<(String, PodName)> {
    let (names, id) = file.strip_suffix(".log")?.rsplit_once('-')?;
    if id.len() != 64 || !id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    // None of the three can hold an underscore, by Kubernetes' rules for names.
    let mut parts = names.split('_');
    let (pod, namespace, container) = (parts.next()?, parts.next()?, parts.next()?);
    let right = |name: &str| {
        (1..=253).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.'))
    };
    if parts.next().is_some() || ![pod, namespace, container].into_iter().all(right) {
        return None;
    }
    let container = (file.len() < LONGEST).then(|| container.to_owned());
    Some((id.to_owned(), PodName { pod: pod.to_owned(), namespace: namespace.to_owned(), container }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn a_log_files_name_is_pod_namespace_and_container() {
        let (id, name) = parse(&format!("prefill-0_llm-serving_sglang-server-{ID}.log")).unwrap();
        assert_eq!(id, ID);
        assert_eq!((name.pod.as_str(), name.namespace.as_str()), ("prefill-0", "llm-serving"));
        assert_eq!(name.container.as_deref(), Some("sglang-server"));
    }

    #[test]
    fn a_container_name_that_the_kubelet_has_cut_is_none() {
        let pod = "p".repeat(255 - 64 - "_ns_cont-.log".len());
        let file = format!("{pod}_ns_cont-{ID}.log");
        assert_eq!(file.len(), 255);
        let (_, name) = parse(&file).unwrap();
        assert_eq!((name.pod, name.container), (pod, None));
    }

    #[test]
    fn other_files_are_no_containers() {
        let short = &ID[1..];
        for file in [
            format!("a_b_c-{short}.log"),
            format!("a_b_c-{ID}"),
            format!("a_b-{ID}.log"),
            format!("a_b_c_d-{ID}.log"),
            format!("a__c-{ID}.log"),
            format!("\u{1b}[31m_b_c-{ID}.log"),
            format!("a_b_c-{}.log", ID.to_uppercase()),
            "syslog".to_owned(),
            String::new(),
        ] {
            assert_eq!(parse(&file), None, "{file}");
        }
    }

    #[test]
    fn a_container_is_found_when_its_name_appears() {
        let dir = tempfile::tempdir().unwrap();
        let mut pods = Pods::in_directory(Some(dir.path().to_owned()));
        pods.begin();
        assert_eq!(pods.name(ID), None);
        // A link to what this process cannot see is as good.
        let link = dir.path().join(format!("decode_ns_c-{ID}.log"));
        std::os::unix::fs::symlink("/nowhere/0.log", link).unwrap();
        assert_eq!(pods.name(ID), None, "once in a look");
        pods.begin();
        assert_eq!(pods.name(ID).unwrap().pod, "decode");
        let mut nowhere = Pods::in_directory(Some(dir.path().join("none")));
        assert_eq!((nowhere.name(ID), Pods::in_directory(None).name(ID)), (None, None));
    }
}
