//! A certificate authority and a server certificate for `localhost`, generated for each server, and a client config that
//! trusts them.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Certificates and key as PEM.
pub(crate) struct Certificates {
    pub(crate) authority: String,
    pub(crate) server: String,
    pub(crate) server_key: String,
}

impl Certificates {
    pub(crate) fn generate() -> Self {
        Self::try_generate().expect("rcgen signs with a fresh key")
    }

    fn try_generate() -> Result<Self, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "Weir test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

        // No IP address among the names: connecting to 127.0.0.1 must fail a full verification.
        let server_key = KeyPair::generate()?;
        let server = CertificateParams::new(["localhost".to_owned()])?.signed_by(&server_key, &authority)?;
        Ok(Self { authority: authority.pem(), server: server.pem(), server_key: server_key.serialize_pem() })
    }
}

/// A client config that trusts only the authority in `ca_file`, which the testkit wrote.
pub(crate) fn client_config(ca_file: &Path) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(ca_file).expect("the testkit wrote this file as PEM");
    roots.add(authority).expect("the testkit created this authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}
