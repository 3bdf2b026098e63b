//! Certificate authorities and what they issue: for each server of a test a certificate for `localhost`, and a client config
//! that trusts it.

use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key as PEM.
#[derive(Clone, Debug)]
pub struct Certificate {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn generate() -> Self {
        Self::try_generate().expect("rcgen signs with a fresh key")
    }

    fn try_generate() -> Result<Self, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "Weir test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Ok(Self(CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?))
    }

    /// The authority's own certificate as PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for servers and clients with these host names and addresses.
    pub fn issue(&self, names: &[&str]) -> Certificate {
        self.try_issue(names).expect("rcgen signs with a fresh key")
    }

    fn try_issue(&self, names: &[&str]) -> Result<Certificate, rcgen::Error> {
        let key = KeyPair::generate()?;
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut parameters = CertificateParams::new(names)?;
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = parameters.signed_by(&key, &self.0)?;
        Ok(Certificate { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// Certificates and key as PEM.
pub(crate) struct Certificates {
    pub(crate) authority: String,
    pub(crate) server: String,
    pub(crate) server_key: String,
}

impl Certificates {
    pub(crate) fn generate() -> Self {
        let authority = Authority::generate();
        // No IP address among the names: connecting to 127.0.0.1 must fail a full verification.
        let Certificate { certificate, key } = authority.issue(&["localhost"]);
        Self { authority: authority.pem(), server: certificate, server_key: key }
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
