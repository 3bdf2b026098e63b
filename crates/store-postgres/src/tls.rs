//! Verifies the server's certificate as `sslmode` says.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::target::Trust;

/// Creates the TLS connector of one connection. Reads the root certificates each time, so that a replaced file is used.
pub(crate) fn connector(trust: &Trust) -> Result<MakeRustlsConnect> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::failed(ENGINE, source))?;
    let config = match trust {
        Trust::Host(root) => builder.with_root_certificates(roots(root.as_deref())?).with_no_client_auth(),
        Trust::Authority(root) => {
            let verifier = WebPkiServerVerifier::builder_with_provider(
                Arc::new(roots(root.as_deref())?),
                Arc::clone(&provider),
            );
            let chain = verifier.build().map_err(|source| Error::failed(ENGINE, source))?;
            with_verifier(builder, LenientVerifier { chain: Some(chain), provider })
        }
        Trust::Anyone => with_verifier(builder, LenientVerifier { chain: None, provider }),
    };
    Ok(MakeRustlsConnect::new(config))
}

fn with_verifier(
    builder: rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>,
    verifier: LenientVerifier,
) -> ClientConfig {
    builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
}

fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match file {
        Some(file) => {
            let unreadable = |source| {
                Error::failed(ENGINE, format!("cannot read sslrootcert {}: {source}", file.display()))
            };
            for certificate in CertificateDer::pem_file_iter(file).map_err(unreadable)? {
                roots
                    .add(certificate.map_err(unreadable)?)
                    .map_err(|source| Error::failed(ENGINE, source))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    Ok(roots)
}

/// Checks less than rustls by default, as `require` and `verify-ca` demand.
#[derive(Debug)]
struct LenientVerifier {
    /// Checks who signed the certificate, but not the name in it. `None` checks nothing.
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for LenientVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
