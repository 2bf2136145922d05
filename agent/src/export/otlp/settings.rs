//! From YAML and the standard environment variables to where one signal goes.
//!
//! Reads certificate files; the environment comes in as a function. YAML wins over a signal's own variable,
//! that over the general one (OpenTelemetry specification, "OpenTelemetry Protocol Exporter").

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderName, HeaderValue};

use super::config::{Compression, OtlpConfig, Protocol};
use super::endpoint::{self, with_scheme};
use crate::export::counters::Signal;

/// Default of `OTEL_EXPORTER_OTLP_TIMEOUT`.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Looks a variable up; empty counts as not set.
pub(super) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Why OTLP cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The endpoint is no URL that can be used.
    #[error(
        "OTLP endpoint `{endpoint}` (from {source_name}): {why} (write http://host:4317 or https://host:4317)"
    )]
    Endpoint {
        /// As written, without its login.
        endpoint: String,
        /// Where it was written.
        source_name: String,
        /// What is wrong.
        why: String,
    },
    /// A protocol that this agent does not speak.
    #[error("OTLP protocol `{protocol}` (from {source_name}) is not spoken; use `grpc` or `http/protobuf`")]
    Protocol {
        /// As written.
        protocol: String,
        /// Where it was written.
        source_name: String,
    },
    /// A header that HTTP does not allow.
    #[error(
        "export.otlp.headers: `{name}` is not a header that can be sent (letters, digits and - in the name, visible ASCII in the value)"
    )]
    Header {
        /// Its name.
        name: String,
    },
    /// A certificate or key that cannot be read or used.
    #[error("OTLP {what} {path}: {why}")]
    Certificate {
        /// Which.
        what: &'static str,
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A certificate without its key or the reverse.
    #[error("OTLP client certificate and client key belong together: only the {0} is set")]
    HalfIdentity(&'static str),
    /// The library refuses the settings.
    #[error("OTLP to {endpoint} cannot be set up: {why}")]
    Build {
        /// Where to.
        endpoint: String,
        /// What it says.
        why: String,
    },
}

/// Where one signal goes, everything resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) protocol: Protocol,
    /// With scheme and without login; over HTTP with its path.
    pub(super) endpoint: String,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) timeout: Duration,
    pub(super) gzip: bool,
    pub(super) tls: Tls,
}

/// PEM texts.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Tls {
    pub(super) ca: Option<Vec<u8>>,
    pub(super) identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tls {{ ca: {}, identity: {} }}", self.ca.is_some(), self.identity.is_some())
    }
}

/// Resolves one signal; `None`: it goes nowhere.
///
/// # Errors
/// [`OtlpError`].
pub(super) fn resolve(
    config: &OtlpConfig,
    signal: Signal,
    env: Env<'_>,
) -> Result<Option<Target>, OtlpError> {
    let lookup = Lookup { signal, env };
    let Some((written, source_name, base)) = lookup.endpoint(config) else { return Ok(None) };
    let protocol = lookup.protocol(config)?;
    let (mut endpoint, login) = endpoint::with_authorization(&with_scheme(&written, lookup.insecure()));
    if protocol == Protocol::HttpProtobuf && base {
        endpoint = format!("{}/v1/{}", endpoint.trim_end_matches('/'), signal.label());
    }
    if let Some(why) = endpoint::problem(&endpoint) {
        let endpoint = endpoint::without_login(&written).into_owned();
        return Err(OtlpError::Endpoint { endpoint, source_name, why });
    }
    Ok(Some(Target {
        protocol,
        endpoint,
        headers: lookup.headers(config, login)?,
        timeout: lookup.timeout(config),
        gzip: lookup.gzip(config),
        tls: lookup.tls(config)?,
    }))
}

struct Lookup<'a> {
    signal: Signal,
    env: Env<'a>,
}

impl Lookup<'_> {
    /// The signal's own variable, else the general one, with the name it was found under.
    fn variable(&self, what: &str) -> Option<(String, String)> {
        let own = format!("OTEL_EXPORTER_OTLP_{}_{what}", self.signal.label().to_ascii_uppercase());
        let general = format!("OTEL_EXPORTER_OTLP_{what}");
        [own, general]
            .into_iter()
            .find_map(|name| (self.env)(&name).filter(|v| !v.is_empty()).map(|v| (v, name)))
    }

    /// Endpoint, where it was written, and whether the signal's path is still to be appended over HTTP.
    fn endpoint(&self, config: &OtlpConfig) -> Option<(String, String, bool)> {
        if let Some(endpoint) = config.endpoint.as_ref().filter(|e| !e.as_written().is_empty()) {
            return Some((endpoint.as_written().to_owned(), "export.otlp.endpoint".to_owned(), true));
        }
        let (value, name) = self.variable("ENDPOINT")?;
        let general = name == "OTEL_EXPORTER_OTLP_ENDPOINT";
        Some((value, name, general))
    }

    fn protocol(&self, config: &OtlpConfig) -> Result<Protocol, OtlpError> {
        if let Some(protocol) = config.protocol {
            return Ok(protocol);
        }
        match self.variable("PROTOCOL") {
            None => Ok(Protocol::default()),
            Some((value, _)) if value == "grpc" => Ok(Protocol::Grpc),
            Some((value, _)) if value == "http/protobuf" => Ok(Protocol::HttpProtobuf),
            Some((protocol, source_name)) => Err(OtlpError::Protocol { protocol, source_name }),
        }
    }

    fn insecure(&self) -> bool {
        self.variable("INSECURE").is_some_and(|(v, _)| v.eq_ignore_ascii_case("true"))
    }

    fn timeout(&self, config: &OtlpConfig) -> Duration {
        let from_env = || {
            let (value, name) = self.variable("TIMEOUT")?;
            let millis = value.parse().map(Duration::from_millis);
            millis
                .inspect_err(|_| tracing::warn!(%name, %value, "ignored: not a number of milliseconds"))
                .ok()
        };
        config.timeout.or_else(from_env).filter(|t| !t.is_zero()).unwrap_or(TIMEOUT)
    }

    fn gzip(&self, config: &OtlpConfig) -> bool {
        if let Some(compression) = config.compression {
            return compression == Compression::Gzip;
        }
        match self.variable("COMPRESSION") {
            Some((value, _)) if value == "gzip" => true,
            Some((value, name)) if value != "none" => {
                tracing::warn!(%name, %value, "ignored: only gzip and none are supported");
                false
            }
            _ => false,
        }
    }

    /// `login`: what the endpoint says; a header that says so itself wins.
    fn headers(
        &self,
        config: &OtlpConfig,
        login: Option<HeaderValue>,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, OtlpError> {
        let mut headers = BTreeMap::new();
        if let Some(login) = login {
            headers.insert(AUTHORIZATION.as_str().to_owned(), (AUTHORIZATION, login));
        }
        if let Some((list, variable)) = self.variable("HEADERS") {
            for (name, value) in pairs(&list) {
                if let Some((n, v)) = header(&name, &value) {
                    headers.insert(n.as_str().to_owned(), (n, v));
                } else {
                    tracing::warn!(%variable, %name, "ignored: not a header that can be sent");
                }
            }
        }
        for (name, value) in &config.headers {
            let (n, v) = header(name, &value.0).ok_or_else(|| OtlpError::Header { name: name.clone() })?;
            headers.insert(n.as_str().to_owned(), (n, v));
        }
        Ok(headers.into_values().collect())
    }

    fn tls(&self, config: &OtlpConfig) -> Result<Tls, OtlpError> {
        let file = |configured: &Option<PathBuf>, variable| {
            configured.clone().or_else(|| self.variable(variable).map(|(v, _)| PathBuf::from(v)))
        };
        let ca = file(&config.tls.ca, "CERTIFICATE");
        let cert = file(&config.tls.cert, "CLIENT_CERTIFICATE");
        let key = file(&config.tls.key, "CLIENT_KEY");
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((pem("client certificate", &cert)?, pem("client key", &key)?)),
            (None, None) => None,
            (Some(_), None) => return Err(OtlpError::HalfIdentity("certificate")),
            (None, Some(_)) => return Err(OtlpError::HalfIdentity("key")),
        };
        Ok(Tls { ca: ca.map(|p| pem("CA certificate", &p)).transpose()?, identity })
    }
}

pub(super) fn header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(value).ok()?))
}

fn pem(what: &'static str, path: &Path) -> Result<Vec<u8>, OtlpError> {
    let wrong = |why: String| OtlpError::Certificate { what, path: path.to_owned(), why };
    let text = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    if text.windows(10).any(|w| w == b"-----BEGIN") { Ok(text) } else { Err(wrong("is not PEM".to_owned())) }
}

/// `a=1,b=two%20words`, as `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_RESOURCE_ATTRIBUTES` have it.
pub(super) fn pairs(list: &str) -> Vec<(String, String)> {
    let split = list.split(',').filter_map(|p| p.split_once('='));
    let trimmed = split.map(|(k, v)| (k.trim().to_owned(), percent_decoded(v.trim())));
    trimmed.filter(|(k, _)| !k.is_empty()).collect()
}

/// `%41` → `A`; what is no such sequence, or no UTF-8 in the end, stays as it is.
pub(super) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = after.first_chunk::<2>().and_then(|h| std::str::from_utf8(h).ok());
        let byte = hex.filter(|_| *first == b'%').and_then(|h| u8::from_str_radix(h, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::export::otlp::config::Secret;

    fn resolved(
        config: &OtlpConfig,
        signal: Signal,
        variables: &[(&str, &str)],
    ) -> Result<Option<Target>, OtlpError> {
        let all: BTreeMap<_, _> = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        resolve(config, signal, &|name| all.get(name).cloned())
    }

    fn traces(variables: &[(&str, &str)]) -> Target {
        resolved(&OtlpConfig::default(), Signal::Traces, variables).unwrap().unwrap()
    }

    #[test]
    fn nothing_set_sends_nothing_and_one_signal_can_be_sent_alone() {
        let config = OtlpConfig::default();
        assert_eq!(resolved(&config, Signal::Traces, &[]).unwrap(), None);
        assert_eq!(resolved(&config, Signal::Traces, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]).unwrap(), None);
        let only = [("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a:4317")];
        assert_eq!(traces(&only).endpoint, "http://a:4317");
        assert_eq!(resolved(&config, Signal::Logs, &only).unwrap(), None);
    }

    #[test]
    fn the_endpoint_follows_the_specification() {
        let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
        let general = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/base/");
        assert_eq!(traces(&[general, http]).endpoint, "http://c:4318/base/v1/traces");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:4318/mine");
        assert_eq!(traces(&[general, http, own]).endpoint, "http://t:4318/mine");
        let bare = ("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317");
        assert_eq!(traces(&[bare]).endpoint, "https://c:4317");
        assert_eq!(traces(&[bare, ("OTEL_EXPORTER_OTLP_INSECURE", "true")]).endpoint, "http://c:4317");
        assert_eq!(
            traces(&[
                bare,
                ("OTEL_EXPORTER_OTLP_INSECURE", "true"),
                ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "false")
            ])
            .endpoint,
            "https://c:4317"
        );
    }

    #[test]
    fn yaml_wins_over_a_signals_variable_and_that_over_the_general_one() {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://general:1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2000"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "general=1"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=b%20c, Same = env"),
        ];
        let target = traces(&variables);
        assert_eq!((target.timeout, target.gzip), (Duration::from_secs(2), true));
        let shown: Vec<_> = target.headers.iter().map(|(k, v)| (k.as_str(), v.to_str().unwrap())).collect();
        assert_eq!(shown, [("a", "b c"), ("same", "env")]);
        let config = OtlpConfig {
            endpoint: Some("http://yaml:1".to_owned().into()),
            timeout: Some(Duration::from_secs(3)),
            compression: Some(Compression::None),
            headers: [("Same".to_owned(), Secret("yaml".to_owned()))].into(),
            ..OtlpConfig::default()
        };
        let target = resolved(&config, Signal::Traces, &variables).unwrap().unwrap();
        assert_eq!(
            (target.endpoint.as_str(), target.timeout, target.gzip),
            ("http://yaml:1", Duration::from_secs(3), false)
        );
        assert!(target.headers.iter().any(|(k, v)| k == "same" && v == "yaml"));
    }

    #[test]
    fn what_cannot_work_is_named() {
        let config = OtlpConfig::default();
        let error = |variables: &[(&str, &str)]| {
            resolved(&config, Signal::Traces, variables).unwrap_err().to_string()
        };
        assert!(error(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://a")]).contains("OTEL_EXPORTER_OTLP_ENDPOINT"));
        assert!(error(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[x")]).contains("http://[x"));
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1");
        assert!(error(&[endpoint, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]).contains("http/json"));
        assert!(
            error(&[endpoint, ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nonexistent")]).contains("/nonexistent")
        );
        assert!(
            error(&[endpoint, ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/nonexistent")]).contains("only the key")
        );
        let config = OtlpConfig {
            headers: [("a b".to_owned(), Secret("c".to_owned()))].into(),
            ..OtlpConfig::default()
        };
        assert!(resolved(&config, Signal::Traces, &[endpoint]).unwrap_err().to_string().contains("`a b`"));
    }

    #[test]
    fn a_login_in_the_endpoint_is_sent_and_never_shown() {
        let login = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:secret@host:4317");
        let target = traces(&[login]);
        assert_eq!(target.endpoint, "https://host:4317");
        let value = |t: &Target| t.headers.iter().find(|(k, _)| k == AUTHORIZATION).map(|(_, v)| v.clone());
        assert_eq!(value(&target).unwrap(), "Basic dXNlcjpzZWNyZXQ=");
        assert!(!format!("{target:?}").contains("dXNlcjpzZWNyZXQ"), "{target:?}");
        let own = traces(&[login, ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20x")]);
        assert_eq!(value(&own).unwrap(), "Bearer x");
        let config = OtlpConfig {
            endpoint: Some("ftp://user:secret@host".to_owned().into()),
            ..OtlpConfig::default()
        };
        let error = resolved(&config, Signal::Traces, &[]).unwrap_err();
        assert!(error.to_string().contains("ftp://<hidden>@host"), "{error}");
        assert!(!format!("{error} {error:?} {config:?}").contains("secret"), "{error:?} {config:?}");
    }

    #[test]
    fn bad_numbers_in_the_environment_are_ignored_as_the_specification_asks() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1");
        assert_eq!(traces(&[endpoint, ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")]).timeout, TIMEOUT);
        assert!(!traces(&[endpoint, ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")]).gzip);
    }

    #[test]
    fn percent_sequences_are_decoded_and_others_stay() {
        assert_eq!(percent_decoded("a%2Cb%"), "a,b%");
        assert_eq!(percent_decoded("%zz%ff"), "%zz%ff");
        assert_eq!(pairs("a=1,,=x,b, c = d=e "), [("a".into(), "1".into()), ("c".into(), "d=e".into())]);
    }
}
