//! Which paths may be passed on.
//!
//! A path goes to the upstream byte for byte, and nobody knows how often that one decodes it or what it takes for a
//! separator. So a path is refused when any such reading of it has a segment `.` or `..`, by which it would leave the
//! prefix that was limited, or a control character, by which it could end early.

/// How often an upstream might decode. What is still encoded after that has no honest meaning.
const ROUNDS_MAX: usize = 4;

/// Whether a path stays where it seems to be, however it is read.
#[must_use]
pub(super) fn stays(path: &str) -> bool {
    let mut text = path.as_bytes();
    let mut decoded: Vec<u8>;
    for _ in 0..ROUNDS_MAX {
        if !is_plain(text) {
            return false;
        }
        let Some(next) = decode(text) else { return true };
        decoded = next;
        text = &decoded;
    }
    is_plain(text) && decode(text).is_none()
}

fn is_plain(path: &[u8]) -> bool {
    let is_separator = |byte: &u8| matches!(byte, b'/' | b'\\');
    // Some servers cut parameters off every segment before they look at it: `..;x` is `..` to them.
    let name = |segment: &[u8]| segment.iter().take_while(|byte| **byte != b';').count();
    path.split(is_separator).all(|segment| !matches!(&segment[..name(segment)], b"." | b".."))
        && !path.iter().any(u8::is_ascii_control)
}

/// What one decoding makes of a path; none when there is nothing to decode.
fn decode(path: &[u8]) -> Option<Vec<u8>> {
    let first = (0..path.len()).find(|at| encoded(path, *at).is_some())?;
    let mut decoded = path[..first].to_vec();
    let mut at = first;
    while let Some(byte) = path.get(at) {
        let (byte, length) = encoded(path, at).map_or((*byte, 1), |byte| (byte, 3));
        decoded.push(byte);
        at += length;
    }
    Some(decoded)
}

/// The byte that `%XX` stands for, if that is what is here.
fn encoded(path: &[u8], at: usize) -> Option<u8> {
    let [b'%', high, low] = path.get(at..at + 3)? else { return None };
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    u8::try_from(digit(high)? * 16 + digit(low)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_paths_stay() {
        for path in [
            "/api/v1/ai",
            "/api/v1/ai/",
            "/api/v1/ai/chat/completions",
            "/api/v1/ai//double//slashes/",
            "/api/v1/ai/models/org%2Fname",
            "/api/v1/ai/file.tar.gz/...",
            "/api/v1/ai/.hidden/a..b/..c",
            "/api/v1/ai/100%",
            "/api/v1/ai/100%zz/%2",
            "/api/v1/ai/%e4%bd%a0%20%25",
            "/api/v1/ai/a;b=c",
        ] {
            assert!(stays(path), "{path}");
        }
    }

    #[test]
    fn a_path_that_leads_out_of_its_prefix_under_any_reading_does_not() {
        for path in [
            "/api/v1/ai/../admin",
            "/api/v1/ai/./x",
            "/api/v1/ai/..",
            "/api/v1/ai/x/..",
            "/api/v1/ai/%2e%2e/admin",
            "/api/v1/ai/%2E./admin",
            "/api/v1/ai/.%2e",
            "/api/v1/ai/x%2f..%2f..%2fadmin",
            "/api/v1/ai/..%2fadmin",
            "/api/v1/ai/..\\admin",
            "/api/v1/ai/..%5cadmin",
            "/api/v1/ai/%252e%252e/admin",
            "/api/v1/ai/%25252e%25252e/admin",
            "/api/v1/ai/..;/admin",
            "/api/v1/ai/..;a=b/admin",
            "/api/v1/ai/%2e%2e%3b/admin",
            "/api/v1/ai/x%00",
            "/api/v1/ai/x%0d%0aHost:%20y",
            "/api/v1/ai/%2525252525252541",
        ] {
            assert!(!stays(path), "{path}");
        }
    }

    #[test]
    fn a_long_path_costs_no_more_than_a_few_looks() {
        let path = format!("/api/v1/ai/{}", "%25".repeat(20_000));
        assert!(stays(&path), "percent signs");
        let path = format!("/api/v1/ai/%{}41", "25".repeat(30_000));
        assert!(!stays(&path), "encoded too often");
    }
}
