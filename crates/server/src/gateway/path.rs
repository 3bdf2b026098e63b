//! Which paths may be forwarded.
//!
//! A path goes to the upstream byte for byte, and upstreams differ in how often they decode it and what they treat as a
//! separator. So a path is refused when any such reading contains a segment `.` or `..`, which would lead out of the prefix,
//! or a control character, which could end the path early.

use std::borrow::Cow;

/// How often an upstream might decode a path. One that is still encoded after that is refused.
const DECODINGS_MAX: usize = 4;

/// Whether a path stays below its prefix however an upstream reads it.
#[must_use]
pub(super) fn is_confined(path: &str) -> bool {
    let mut text = Cow::Borrowed(path.as_bytes());
    for _ in 0..=DECODINGS_MAX {
        if !is_plain(&text) {
            return false;
        }
        if let Some(folded) = fold(&text) {
            if !is_plain(&folded) {
                return false;
            }
            text = Cow::Owned(folded);
        }
        let Some(decoded) = decode(&text) else { return true };
        text = Cow::Owned(decoded);
    }
    false
}

fn is_plain(path: &[u8]) -> bool {
    let is_separator = |byte: &u8| matches!(byte, b'/' | b'\\');
    // Some servers remove parameters from every segment first: to them `..;x` is `..`.
    let name = |segment: &[u8]| segment.iter().take_while(|byte| **byte != b';').count();
    path.split(is_separator).all(|segment| !matches!(&segment[..name(segment)], b"." | b".."))
        && !path.iter().any(u8::is_ascii_control)
}

/// Decodes a path once; `None` if nothing is encoded.
fn decode(path: &[u8]) -> Option<Vec<u8>> {
    replace(path, |rest| match rest {
        [b'%', b'u' | b'U', a, b, c, d, ..] => {
            let code = [a, b, c, d].into_iter().try_fold(0, |code, digit| Some(code * 16 + hex(*digit)?))?;
            // Characters that do not matter here become any letter.
            Some((look_alike(code).unwrap_or(b'x'), 6))
        }
        [b'%', high, low, ..] => Some((u8::try_from(hex(*high)? * 16 + hex(*low)?).ok()?, 3)),
        _ => None,
    })
}

fn hex(byte: u8) -> Option<u32> {
    char::from(byte).to_digit(16)
}

/// A path as a lenient UTF-8 decoder reads it: overlong sequences (`%c0%ae` is a dot) and characters that some servers fold
/// to ASCII become ASCII. `None` if there are none.
fn fold(path: &[u8]) -> Option<Vec<u8>> {
    if path.is_ascii() {
        return None;
    }
    replace(path, |rest| {
        let (code, length) = lenient_utf_8(rest)?;
        Some((look_alike(code)?, length))
    })
}

/// Decodes the first character and its length, overlong sequences included.
fn lenient_utf_8(bytes: &[u8]) -> Option<(u32, usize)> {
    let (&first, rest) = bytes.split_first()?;
    // As many leading ones as bytes; the first definition of UTF-8 allowed up to six.
    let length = usize::try_from(first.leading_ones()).ok().filter(|length| (2..=6).contains(length))?;
    let following = rest.get(..length - 1)?;
    let code = following
        .iter()
        .fold(u32::from(first) & (0x7f >> length), |code, byte| (code << 6) | u32::from(byte & 0x3f));
    let is_whole = following.iter().all(|byte| byte & 0xc0 == 0x80);
    // Some decoders check only the first byte: to them `%c0%2e` is a dot, too.
    let is_mark = matches!(u8::try_from(code), Ok(b'.' | b'/' | b'\\'));
    (is_whole || length == 2 && is_mark).then_some((code, length))
}

/// The ASCII character that a code point is, or is folded to by Unicode's compatibility forms or Windows's best fit.
fn look_alike(code: u32) -> Option<u8> {
    let ascii = match code {
        0..0x80 => code,
        0xff01..=0xff5e => code - 0xfee0, // full width
        0x2024 | 0xfe52 => u32::from(b'.'),
        0x2044 | 0x2215 => u32::from(b'/'),
        0x2216 | 0xfe68 => u32::from(b'\\'),
        _ => return None,
    };
    u8::try_from(ascii).ok()
}

/// Replaces every match of `find`, which returns the replacement and the length of the match. `None` without a match.
fn replace(text: &[u8], find: impl Fn(&[u8]) -> Option<(u8, usize)>) -> Option<Vec<u8>> {
    let first = (0..text.len()).find(|at| find(&text[*at..]).is_some())?;
    let mut replaced = text[..first].to_vec();
    let mut rest = &text[first..];
    while let [byte, ..] = rest {
        let (byte, length) = find(rest).unwrap_or((*byte, 1));
        replaced.push(byte);
        rest = &rest[length..];
    }
    Some(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_paths_are_confined() {
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
            "/api/v1/ai/%c3%80/%C0propos/%E4",
            "/api/v1/ai/%u0041/%u4f60/%u12/100%u",
            "/api/v1/ai/%ef%bc%a1/%e2%80%a4x",
        ] {
            assert!(is_confined(path), "{path}");
        }
    }

    #[test]
    fn a_path_that_leads_out_of_its_prefix_under_any_reading_is_not_confined() {
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
            "/api/v1/ai/%c0%ae%c0%ae/admin",
            "/api/v1/ai/%c0%2e%c0%2e/admin",
            "/api/v1/ai/.%e0%80%ae/admin",
            "/api/v1/ai/%f0%80%80%ae./admin",
            "/api/v1/ai/%f8%80%80%80%ae./admin",
            "/api/v1/ai/x%c0%af..%c0%afadmin",
            "/api/v1/ai/..%c1%9cadmin",
            "/api/v1/ai/..%e0%81%9cadmin",
            "/api/v1/ai/%c0%a52e./admin",
            "/api/v1/ai/%25c0%25ae./admin",
            "/api/v1/ai/x%c0%80",
            "/api/v1/ai/%u002e%u002e/admin",
            "/api/v1/ai/%U002E./admin",
            "/api/v1/ai/..%u002fadmin",
            "/api/v1/ai/..%u005cadmin",
            "/api/v1/ai/%u0025u002e./admin",
            "/api/v1/ai/%25u002e./admin",
            "/api/v1/ai/x%u0000",
            "/api/v1/ai/%uff0e%uff0e/admin",
            "/api/v1/ai/..%u2215admin",
            "/api/v1/ai/%ef%bc%8e%ef%bc%8e/admin",
            "/api/v1/ai/\u{ff0e}\u{ff0e}/admin",
        ] {
            assert!(!is_confined(path), "{path}");
        }
    }

    #[test]
    fn a_long_path_is_decoded_only_a_few_times() {
        let path = format!("/api/v1/ai/{}", "%25".repeat(20_000));
        assert!(is_confined(&path), "percent signs");
        let path = format!("/api/v1/ai/%{}41", "25".repeat(30_000));
        assert!(!is_confined(&path), "encoded too often");
    }
}
