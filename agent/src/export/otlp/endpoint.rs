//! The address of a receiver, which may carry a login that is never shown.
//!
//! Pure.

use std::borrow::Cow;
use std::fmt;

use axum::http::{HeaderValue, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize, Serializer};

use super::config::HIDDEN;
use super::settings::percent_decoded;

/// URL of a receiver. A login in it (`https://user:password@host`) is sent as basic authorization and shown as
/// `https://<hidden>@host`.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Endpoint(String);

impl Endpoint {
    /// With its login, for use and not for show.
    pub(super) fn as_written(&self) -> &str {
        &self.0
    }

    /// Whether its login was lost when it was shown.
    pub(crate) fn is_hidden(&self) -> bool {
        self.0.contains(HIDDEN)
    }

    /// Whether it surely is this address, or where this address listens.
    pub(crate) fn is_at(&self, listen: std::net::SocketAddr) -> bool {
        let Ok(uri) = split(&with_scheme(&self.0, false)).0.parse::<Uri>() else { return false };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let ip = if host == "localhost" { "127.0.0.1" } else { host }.parse::<std::net::IpAddr>();
        let here = |ip: std::net::IpAddr| {
            ip == listen.ip()
                || (ip.is_loopback() && (listen.ip().is_loopback() || listen.ip().is_unspecified()))
        };
        uri.port_u16() == Some(listen.port()) && ip.is_ok_and(here)
    }

    /// Why it cannot be used; nothing is wrong with an empty one, which means none.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.0.is_empty() { None } else { problem(&with_scheme(&self.0, false)) }
    }
}

impl From<String> for Endpoint {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_login(&self.0))
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&without_login(&self.0), f)
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&without_login(&self.0))
    }
}

/// OTLP specification: an endpoint without scheme is TLS unless `…_INSECURE` says otherwise.
pub(super) fn with_scheme(endpoint: &str, insecure: bool) -> String {
    let has_scheme = endpoint.split_once("://").is_some_and(|(scheme, _)| !scheme.contains(['/', '?', '#']));
    match (has_scheme, insecure) {
        (true, _) => endpoint.to_owned(),
        (false, true) => format!("http://{endpoint}"),
        (false, false) => format!("https://{endpoint}"),
    }
}

/// Why a URL with a scheme cannot be used.
pub(super) fn problem(url: &str) -> Option<String> {
    match split(url).0.parse::<Uri>() {
        Ok(uri) if uri.host().is_none_or(str::is_empty) => Some("has no host".to_owned()),
        Ok(uri) if !matches!(uri.scheme_str(), Some("http" | "https")) => {
            Some("has another scheme than http or https".to_owned())
        }
        Ok(_) => None,
        Err(e) => Some(e.to_string()),
    }
}

/// The URL without its login, and the header that says the same: logs, errors and the wire then show no password.
pub(super) fn with_authorization(url: &str) -> (String, Option<HeaderValue>) {
    let (bare, login) = split(url);
    let header = login.and_then(|login| {
        let login = if login.contains(':') { Cow::Borrowed(login) } else { Cow::Owned(format!("{login}:")) };
        let encoded = STANDARD.encode(percent_decoded(&login));
        let mut header = HeaderValue::from_str(&format!("Basic {encoded}")).ok()?;
        header.set_sensitive(true);
        Some(header)
    });
    (bare, header)
}

/// The URL as it may be shown. A name alone is hidden too: services take tokens there.
pub(crate) fn without_login(url: &str) -> Cow<'_, str> {
    match place_of_login(url) {
        Some(at) => Cow::Owned(
            [url.get(..at.start), Some(HIDDEN), url.get(at.end..)].map(Option::unwrap_or_default).concat(),
        ),
        None => Cow::Borrowed(url),
    }
}

fn split(url: &str) -> (String, Option<&str>) {
    match place_of_login(url) {
        Some(at) => {
            let bare = [url.get(..at.start), url.get(at.end + 1..)].map(Option::unwrap_or_default).concat();
            (bare, url.get(at))
        }
        None => (url.to_owned(), None),
    }
}

/// Where the login stands: RFC 3986 section 3.2, up to the last `@` of the authority.
fn place_of_login(url: &str) -> Option<std::ops::Range<usize>> {
    let start = url.find("://").map_or(0, |at| at + 3);
    let rest = url.get(start..)?;
    let authority = rest.get(..rest.find(['/', '?', '#']).unwrap_or(rest.len()))?;
    Some(start..start + authority.rfind('@')?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_never_shown() {
        for (url, shown) in [
            ("https://user:secret@host:4317/p", "https://<hidden>@host:4317/p"),
            ("https://token@host", "https://<hidden>@host"),
            ("user:se@cret@host:4317", "<hidden>@host:4317"),
            ("http://user:secret@", "http://<hidden>@"),
            ("https://host/a@b", "https://host/a@b"),
            ("host:4317", "host:4317"),
        ] {
            let endpoint = Endpoint::from(url.to_owned());
            assert_eq!(endpoint.to_string(), shown);
            assert_eq!(format!("{endpoint:?}"), format!("{shown:?}"));
        }
    }

    #[test]
    fn a_login_becomes_basic_authorization() {
        let (url, header) = with_authorization("https://user:p%40ss@host:4317/x");
        assert_eq!(url, "https://host:4317/x");
        assert_eq!(header, Some(HeaderValue::from_static("Basic dXNlcjpwQHNz")), "user:p@ss");
        let (_, header) = with_authorization("https://token@host");
        assert_eq!(header, Some(HeaderValue::from_static("Basic dG9rZW46")), "token:");
        assert_eq!(with_authorization("https://host/a@b"), ("https://host/a@b".to_owned(), None));
    }

    #[test]
    fn what_is_no_address_is_said() {
        for wrong in ["http://", "ftp://host", "http://[x", "http://a b"] {
            assert!(Endpoint::from(wrong.to_owned()).problem().is_some(), "{wrong}");
        }
        for right in ["", "host:4317", "http://host:4317", "https://u:p^w@host"] {
            assert_eq!(Endpoint::from(right.to_owned()).problem(), None, "{right}");
        }
    }
}
