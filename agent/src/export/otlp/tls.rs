//! HTTP client with the TLS settings of a target: rustls with ring, as for gRPC.

use std::sync::Arc;

use reqwest::Client;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::settings::{Target, Tls};

/// Builds the client.
///
/// # Errors
/// What is wrong with the certificates.
pub(super) fn http_client(target: &Target) -> Result<Client, String> {
    let config = client_config(&target.tls)?;
    Client::builder()
        .timeout(target.timeout)
        // A receiver that moved is told to the operator, not followed with credentials.
        .redirect(reqwest::redirect::Policy::none())
        .tls_backend_preconfigured(config)
        .build()
        .map_err(|e| super::transport::chain(&e))
}

fn client_config(tls: &Tls) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match &tls.ca {
        Some(pem) => {
            for certificate in certificates(pem)? {
                roots.add(certificate).map_err(|e| format!("CA certificate: {e}"))?;
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots);
    match &tls.identity {
        None => Ok(builder.with_no_client_auth()),
        Some((cert, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| format!("client key: {e}"))?;
            builder
                .with_client_auth_cert(certificates(cert)?, key)
                .map_err(|e| format!("client certificate: {e}"))
        }
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.map_err(|e| format!("certificate: {e}"))
}
