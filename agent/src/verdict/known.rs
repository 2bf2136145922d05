//! Known upstream reports, matched by class, backend and release. Pure.

use crate::sglang::message::{Backend, Releases};
use crate::verdict::model::{Class, KnownIssue};

/// Reports that a verdict of this class may be an instance of.
pub fn known_issues(class: Class, backend: Option<Backend>, releases: Option<Releases>) -> Vec<KnownIssue> {
    let _ = (class, backend, releases);
    Vec::new()
}
