//! A certificate authority and a server certificate for `localhost`, made anew for each server.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// PEM texts.
pub(super) struct Certificates {
    pub(super) authority: String,
    pub(super) server: String,
    pub(super) server_key: String,
}

impl Certificates {
    pub(super) fn generate() -> Self {
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
