//! The response parser against responses cut anywhere, several in one buffer, and bytes that are no response.

use super::*;

const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok";
const EMPTY: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nretry-after: 3\r\n\r\n";
const NO_CONTENT: &[u8] = b"HTTP/1.1 204 No Content\r\nx-request-id: 1\r\n\r\n";
const NOT_MODIFIED: &[u8] = b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n";
const CHUNKED: &[u8] =
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nWiki\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n";
const TRAILED: &[u8] =
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 1\r\n\r\n";
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 1\r\n\r\nx";
const CLOSING: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: Close\r\ncontent-length: 4\r\n\r\nbusy";

const ALL: [(&[u8], u16); 8] = [
    (PLAIN, 200),
    (EMPTY, 429),
    (NO_CONTENT, 204),
    (NOT_MODIFIED, 304),
    (CHUNKED, 200),
    (TRAILED, 200),
    (INTERIM, 201),
    (CLOSING, 503),
];

/// Shows the parser `pieces` one after another, keeping what it did not use, as the link does.
fn feed(pieces: &[&[u8]]) -> Result<(Vec<Answer>, Vec<u8>), Malformed> {
    let mut parser = Parser::new();
    let (mut held, mut answers) = (Vec::new(), Vec::new());
    for piece in pieces {
        held.extend_from_slice(piece);
        loop {
            let (used, answer) = parser.advance(&held)?;
            held.drain(..used);
            let Some(answer) = answer else { break };
            answers.push(answer);
        }
    }
    Ok((answers, held))
}

fn statuses(answers: &[Answer]) -> Vec<u16> {
    answers.iter().map(|answer| answer.status).collect()
}

#[test]
fn a_response_cut_at_any_byte_reads_the_same() {
    for (bytes, status) in ALL {
        for cut in 0..=bytes.len() {
            let (answers, held) = feed(&[&bytes[..cut], &bytes[cut..]]).unwrap();
            assert_eq!((statuses(&answers), held.len()), (vec![status], 0), "{status} cut at {cut}");
        }
    }
}

#[test]
fn a_response_given_byte_by_byte_reads_the_same() {
    for (bytes, status) in ALL {
        let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
        let (answers, held) = feed(&pieces).unwrap();
        assert_eq!((statuses(&answers), held.len()), (vec![status], 0));
    }
}

#[test]
fn a_response_that_lacks_its_end_is_not_an_answer() {
    for (bytes, status) in ALL {
        for cut in 0..bytes.len() {
            let (answers, _) = feed(&[&bytes[..cut]]).unwrap();
            assert!(answers.is_empty(), "{status} cut at {cut}");
        }
    }
}

#[test]
fn several_responses_in_one_buffer_are_told_apart() {
    let joined = ALL.map(|(bytes, _)| bytes).concat();
    let expected = ALL.map(|(_, status)| status).to_vec();
    for cut in 0..=joined.len() {
        let (answers, held) = feed(&[&joined[..cut], &joined[cut..]]).unwrap();
        assert_eq!((statuses(&answers), held.len()), (expected.clone(), 0), "cut at {cut}");
    }
}

#[test]
fn the_connection_header_and_version_decide_on_keep_alive() {
    let keeps = |bytes: &[u8]| feed(&[bytes]).unwrap().0[0].keep_alive;
    assert!(keeps(PLAIN));
    assert!(!keeps(CLOSING));
    assert!(!keeps(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"));
    assert!(keeps(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nConnection: keep-alive\r\n\r\n"));
}

#[test]
fn a_response_without_a_length_ends_with_the_connection() {
    let mut parser = Parser::new();
    let bytes = b"HTTP/1.1 200 OK\r\n\r\nas long as it lasts";
    assert_eq!(parser.advance(bytes).unwrap(), (bytes.len(), None));
    assert_eq!(parser.close(), Some(Answer { status: 200, keep_alive: false }));
}

#[test]
fn a_connection_closed_inside_a_response_gives_no_answer() {
    let mut parser = Parser::new();
    parser.advance(&PLAIN[..PLAIN.len() - 1]).unwrap();
    assert_eq!(parser.close(), None);
    assert_eq!(Parser::new().close(), None);
}

#[test]
fn garbage_is_refused() {
    let garbage: [&[u8]; 8] = [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc",
    ];
    for bytes in garbage {
        assert!(feed(&[bytes]).is_err(), "{}", bytes.escape_ascii());
    }
}
