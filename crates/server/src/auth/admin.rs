//! The operator's key, in the header `X-Admin-Key`.

use http::HeaderMap;
use subtle::ConstantTimeEq;

/// The header it travels in.
pub const HEADER: &str = "x-admin-key";

/// The operator's key.
pub struct AdminKey(Box<[u8]>);

impl AdminKey {
    /// Takes over a key.
    #[must_use]
    pub fn new(key: &str) -> Self {
        Self(key.as_bytes().into())
    }

    /// Whether the headers carry the key. Takes as long whatever differs.
    #[must_use]
    pub fn matches(&self, headers: &HeaderMap) -> bool {
        headers.get(HEADER).is_some_and(|given| given.as_bytes().ct_eq(&self.0).into())
    }
}

impl std::fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AdminKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_key_matches() {
        let key = AdminKey::new("0123456789abcdef");
        let with = |value: &str| HeaderMap::from_iter([(HEADER.parse().unwrap(), value.parse().unwrap())]);
        assert!(key.matches(&with("0123456789abcdef")));
        for wrong in ["", "0", "0123456789abcde", "0123456789abcdefg", "0123456789ABCDEF"] {
            assert!(!key.matches(&with(wrong)), "{wrong}");
        }
        assert!(!key.matches(&HeaderMap::new()));
        assert!(!format!("{key:?}").contains("0123"));
    }
}
