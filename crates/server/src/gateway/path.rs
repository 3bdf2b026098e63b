//! Which paths may be passed on.
//!
//! A path goes to the upstream byte for byte, and nobody knows how often that one decodes it or what it takes for a
//! separator. So a path is refused when any such reading of it has a segment `.` or `..`, by which it would leave the
//! prefix that was limited, or a control character, by which it could end early.

use std::borrow::Cow;

/// How often an upstream might decode. What is still encoded after that has no honest meaning.
const ROUNDS_MAX: usize = 4;

/// Whether a path stays where it seems to be, however it is read.
#[must_use]
pub(super) fn stays(path: &str) -> bool {
    let mut text = Cow::Borrowed(path.as_bytes());
    for _ in 0..=ROUNDS_MAX {
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
    // Some servers cut parameters off every segment before they look at it: `..;x` is `..` to them.
    let name = |segment: &[u8]| segment.iter().take_while(|byte| **byte != b';').count();
    path.split(is_separator).all(|segment| !matches!(&segment[..name(segment)], b"." | b".."))
        && !path.iter().any(u8::is_ascii_control)
}

/// What one decoding makes of a path; none when there is nothing to decode.
fn decode(path: &[u8]) -> Option<Vec<u8>> {
    replace(path, |rest| match rest {
        [b'%', b'u' | b'U', a, b, c, d, ..] => {
            let code = [a, b, c, d].into_iter().try_fold(0, |code, digit| Some(code * 16 + hex(*digit)?))?;
            // What stands for nothing that matters is any letter.
            Some((look_alike(code).unwrap_or(b'x'), 6))
        }
        [b'%', high, low, ..] => Some((u8::try_from(hex(*high)? * 16 + hex(*low)?).ok()?, 3)),
        _ => None,
    })
}

fn hex(byte: u8) -> Option<u32> {
    char::from(byte).to_digit(16)
}

/// A path as a careless reader of UTF-8 sees it, with ASCII in place of characters that take more bytes than they need
/// (`%c0%ae` is a dot) or are folded to ASCII; none when there are no such characters.
fn fold(path: &[u8]) -> Option<Vec<u8>> {
    if path.is_ascii() {
        return None;
    }
    replace(path, |rest| {
        let (code, length) = careless_utf_8(rest)?;
        Some((look_alike(code)?, length))
    })
}

/// The character that begins here and its length, whether or not it could have been written in fewer bytes.
fn careless_utf_8(bytes: &[u8]) -> Option<(u32, usize)> {
    let (&first, rest) = bytes.split_first()?;
    // As many leading ones as there are bytes, and at most six in the first edition of UTF-8.
    let length = usize::try_from(first.leading_ones()).ok().filter(|length| (2..=6).contains(length))?;
    let following = rest.get(..length - 1)?;
    let code = following
        .iter()
        .fold(u32::from(first) & (0x7f >> length), |code, byte| (code << 6) | u32::from(byte & 0x3f));
    let is_whole = following.iter().all(|byte| byte & 0xc0 == 0x80);
    // Some look at no more than the first byte: to them `%c0%2e` is a dot too.
    let is_mark = matches!(u8::try_from(code), Ok(b'.' | b'/' | b'\\'));
    (is_whole || length == 2 && is_mark).then_some((code, length))
}

/// The ASCII character that a code stands for or is folded to, by Unicode's compatibility forms or by Windows's best fit.
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

/// A text with everything replaced that `find` finds: the byte to put in place of so many. None when it finds nothing.
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
            "/api/v1/ai/%c3%80/%C0propos/%E4",
            "/api/v1/ai/%u0041/%u4f60/%u12/100%u",
            "/api/v1/ai/%ef%bc%a1/%e2%80%a4x",
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
