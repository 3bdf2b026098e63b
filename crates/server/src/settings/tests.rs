use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::*;

const DEFAULT_FILE: &str = include_str!("../../../../weir.default.toml");

fn environment(pairs: &[(&str, &str)]) -> Sources {
    let environment = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Sources { environment, ..Sources::default() }
}

fn file(text: &str) -> Sources {
    let path = PathBuf::from("weir.toml");
    let values = source::flatten_toml(&path, text).unwrap();
    Sources { file: Some((path, values)), ..Sources::default() }
}

/// Returns the default file with its settings uncommented: lines of the form `# name = value` and `# [table]`.
fn uncommented() -> String {
    let is_setting = |line: &str| {
        line.starts_with('[')
            || line
                .split_once(" = ")
                .is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let lines = DEFAULT_FILE
        .lines()
        .map(|line| line.strip_prefix("# ").filter(|rest| is_setting(rest)).unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_default_file_as_shipped_sets_nothing() {
    let values = source::flatten_toml(Path::new("weir.default.toml"), DEFAULT_FILE).unwrap();
    assert!(values.is_empty(), "{values:?}");
}

#[test]
fn the_default_file_states_every_setting_with_its_default() {
    let defaults = Settings::read(Sources::default()).unwrap();
    assert_eq!(Settings::read(file(&uncommented())).unwrap(), defaults);
    let listed = source::flatten_toml(Path::new("weir.default.toml"), &uncommented()).unwrap();
    let not_in_files = [
        "config",
        "admin_key",
        "jwt_secret",
        "jwks_file",
        "webhook_secret",
        "kafka.password",
        "request.keys",
        "ai.authorization",
        "sale.challenge.secret",
        "sale.challenge.interactive_secret",
    ];
    let mut reader = SettingsReader::new(Sources::default());
    let all = known_settings(&mut reader);
    let missing: Vec<_> =
        all.iter().filter(|key| !listed.contains_key(**key) && !not_in_files.contains(key)).collect();
    assert!(missing.is_empty(), "weir.default.toml does not list {missing:?}");
}

fn known_settings(reader: &mut SettingsReader) -> Vec<&'static str> {
    let process = process::ProcessSettings::read(reader).unwrap();
    store::StoreSettings::read(reader).unwrap();
    auth::AuthSettings::read(reader, &process).unwrap();
    http::HttpSettings::read(reader).unwrap();
    tls::TlsSettings::read(reader).unwrap();
    audit::AuditSettings::read(reader).unwrap();
    lane::LaneLimits::read(reader).unwrap();
    SenderSettings::read(reader).unwrap();
    RequestSettings::read(reader).unwrap();
    SlotSettings::read(reader).unwrap();
    GatewaySettings::read(reader).unwrap();
    TierSettings::read(reader).unwrap();
    SaleSettings::read(reader, process::is_loopback(process.listen)).unwrap();
    edge::EdgeSettings::read(reader).unwrap();
    log::LogSettings::read(reader).unwrap();
    traces::TraceSettings::read(reader).unwrap();
    reader.known().collect()
}

#[test]
fn flags_win_over_the_environment_which_wins_over_the_file() {
    let mut sources = file("listen = \"127.0.0.1:1\"");
    let port = |sources: &Sources| Settings::read(sources.clone()).unwrap().process.listen.port();
    assert_eq!(port(&sources), 1);
    sources.environment.insert("WEIR_LISTEN".into(), "127.0.0.1:2".into());
    assert_eq!(port(&sources), 2);
    sources.flags = BTreeMap::from([("listen", "127.0.0.1:3".to_owned())]);
    assert_eq!(port(&sources), 3);
}

#[test]
fn a_lease_shorter_than_a_call_is_refused() {
    let sentence = |text: &str| Settings::read(file(text)).unwrap_err().to_string();
    let slow = "[request.downstreams.slow]\nurl = \"http://127.0.0.1:1/\"\nread_timeout = \"60s\"";
    for text in ["[request]\nlease = \"4s\"", "[request]\nread_timeout = \"29s\"", slow] {
        assert!(sentence(text).starts_with("request.lease is"), "{}", sentence(text));
    }
    Settings::read(file("[request]\nlease = \"5s\"")).unwrap();
    Settings::read(file(&format!("[request]\nlease = \"62s\"\n{slow}"))).unwrap();
}

#[test]
fn a_wrong_setting_is_one_sentence_with_name_value_and_what_is_allowed() {
    for (name, value, allowed) in [
        ("WEIR_LISTEN", "nowhere", "127.0.0.1:8080"),
        ("WEIR_ROLES", "api,cook", "sender"),
        ("WEIR_HTTP_TIMEOUT", "soon", "500ms"),
        ("WEIR_HTTP_MAX_BODY", "1MB", "1MiB"),
        ("WEIR_LANE_CAPACITY", "0", "1 to"),
        ("WEIR_REQUEST_SSLROOTCERT", "/nonexistent/ca.pem", "PEM"),
        ("WEIR_LOG_LEVEL", "verbose", "debug"),
        ("WEIR_LOG_LEVEL", "info,", "debug"),
        ("WEIR_GRPC_LISTEN", "x", "127.0.0.1:8080"),
        ("WEIR_LOG_FORMAT", "xml", "json"),
        ("WEIR_ALLOW_ANONYMOUS", "maybe", "true or false"),
        ("WEIR_JWKS_URL", "login.example", "https://"),
        ("WEIR_HTTP_ALLOWED_HOSTS", "weir.example.com:80", "without ports"),
    ] {
        let sentence = Settings::read(environment(&[(name, value)])).unwrap_err().to_string();
        for part in [name, value, allowed] {
            assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
        }
        assert!(!sentence.contains('\n'));
    }
}

#[test]
fn the_broker_timeout_must_be_shorter_than_a_call() {
    let kafka = ("WEIR_KAFKA_TIMEOUT", "8s");
    let sentence = Settings::read(environment(&[kafka])).unwrap_err().to_string();
    assert!(sentence.contains("kafka.timeout") && sentence.contains("at most 1.5s"), "{sentence}");
    let settings = Settings::read(environment(&[kafka, ("WEIR_HTTP_TIMEOUT", "10s")])).unwrap();
    assert_eq!(settings.store.kafka_timeout, std::time::Duration::from_secs(8));
}

#[test]
fn half_a_challenge_does_not_pass_for_none() {
    let provider = ("WEIR_SALE_CHALLENGE_PROVIDER", "turnstile");
    let (key, secret) = (("WEIR_SALE_CHALLENGE_SITE_KEY", "k"), ("WEIR_SALE_CHALLENGE_SECRET", "hunter2"));
    let insecure = ("WEIR_SALE_CHALLENGE_VERIFY_URL", "http://verifier.example/");
    let interactive = ("WEIR_SALE_CHALLENGE_INTERACTIVE_SITE_KEY", "k");
    for (settings, named) in [
        (vec![provider], "sale.challenge.provider"),
        (vec![provider, key], "WEIR_SALE_CHALLENGE_SECRET"),
        (vec![secret], "sale.challenge.site_key"),
        (vec![key, secret], "sale.challenge.provider"),
        (vec![provider, key, secret, interactive], "WEIR_SALE_CHALLENGE_INTERACTIVE_SECRET"),
        (vec![provider, key, secret, insecure], "https://"),
        (vec![("WEIR_SALE_CHALLENGE_PROVIDER", "captcha")], "recaptcha"),
        (vec![("WEIR_SALE_IDENTITY", "cookie")], "token"),
    ] {
        let sentence = Settings::read(environment(&settings)).unwrap_err().to_string();
        assert!(sentence.contains(named) && !sentence.contains("hunter2"), "{settings:?}: {sentence}");
    }
    let settings = Settings::read(environment(&[provider, key, secret])).unwrap().sale.challenge.unwrap();
    assert_eq!(settings.verify_url.as_str(), "https://challenges.cloudflare.com/turnstile/v0/siteverify");
    assert!(settings.script_url.as_str().starts_with("https://challenges.cloudflare.com/turnstile/"));
    assert!(!format!("{settings:?}").contains("hunter2"));
}

#[test]
fn secrets_are_never_repeated() {
    for (name, value) in [
        ("WEIR_ADMIN_KEY", "hunter2"),
        ("WEIR_JWT_SECRET", "hunter2"),
        ("WEIR_CACHE", "redis://:hunter2@h/nowhere"),
        ("WEIR_BROKER", "kafka://u:hunter2@h"),
        ("WEIR_STORE", "mysql://u:hunter2@h/d"),
        ("WEIR_STORE", "postgres://u:hunter2@h/d?sslmode=perhaps"),
    ] {
        let sentence = Settings::read(environment(&[(name, value)])).unwrap_err().to_string();
        assert!(sentence.contains(name) && !sentence.contains("hunter2"), "{sentence}");
    }
    let key = "0123456789abcdef-hunter2";
    let settings = Settings::read(environment(&[("WEIR_ADMIN_KEY", key)])).unwrap();
    assert!(!format!("{settings:?}").contains("hunter2"));
    assert!(
        Settings::read(file(&format!("admin_key = \"{key}\"")))
            .unwrap_err()
            .to_string()
            .contains("WEIR_ADMIN_KEY")
    );
}

#[test]
fn an_admin_key_is_trimmed_and_fits_into_a_header() {
    let read = |key: &str| Settings::read(environment(&[("WEIR_ADMIN_KEY", key)]));
    for key in ["0123456789abcdef", "0123456789abcdef\n", "\t 0123456789abcdef \r\n"] {
        assert_eq!(read(key).unwrap().auth.admin_key.as_deref(), Some("0123456789abcdef"));
    }
    for wrong in [
        "",
        "0123456789abcde",
        "          0123456789abcde          ",
        "0123456789 abcdef",
        "0123456789\tabcdef",
        "0123456789\nabcdef",
        "0123456789\u{7f}abcdef",
        "0123456789\u{a0}abcdef",
    ] {
        let sentence = read(wrong).unwrap_err().to_string();
        assert!(sentence.contains("WEIR_ADMIN_KEY") && sentence.contains("at least 16 bytes"), "{sentence}");
        assert!(!sentence.contains("0123456789"), "{sentence}");
    }
}

#[test]
fn a_file_with_a_password_in_a_url_holds_a_secret() {
    let holds = |text: &str| Settings::read(file(text)).unwrap().file_with_secrets.is_some();
    for secret in [
        "store = \"postgres://u:secret@h/d\"",
        "store = \"postgres://u@h/d?password=secret\"",
        "cache = \"redis://:secret@h\"",
        "downstream = \"https://u:secret@h/\"",
        "[request.downstreams.x]\nurl = \"https://u:secret@h/\"",
    ] {
        assert!(holds(secret), "{secret}");
    }
    for plain in ["store = \"postgres://u@h/d\"", "downstream = \"http://h:1/a:b@c\"", "roles = \"api\""] {
        assert!(!holds(plain), "{plain}");
    }
}

#[test]
fn an_unknown_setting_is_refused() {
    let sentence = Settings::read(file("[http]\ntimeot = \"2s\"")).unwrap_err().to_string();
    assert!(sentence.contains("http.timeot") && sentence.contains("weir.default.toml"), "{sentence}");
}

#[test]
fn anonymous_callers_are_allowed_on_loopback_unless_the_setting_says_otherwise() {
    let allowed = |pairs: &[(&str, &str)]| {
        let auth = Settings::read(environment(pairs)).unwrap().auth;
        (auth.allow_anonymous, auth.allow_anonymous_grpc)
    };
    for address in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        assert_eq!(allowed(&[("WEIR_LISTEN", address)]), (true, true), "{address}");
        assert_eq!(allowed(&[("WEIR_LISTEN", address), ("WEIR_ALLOW_ANONYMOUS", "false")]), (false, false));
    }
    for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
        assert_eq!(allowed(&[("WEIR_LISTEN", address)]), (false, true), "{address}");
        assert_eq!(allowed(&[("WEIR_GRPC_LISTEN", address)]), (true, false), "{address}");
        assert_eq!(allowed(&[("WEIR_LISTEN", address), ("WEIR_ALLOW_ANONYMOUS", "true")]), (true, true));
    }
}

#[test]
fn the_keys_of_a_provider_come_encrypted_or_from_this_machine() {
    let read = |url: &str| Settings::read(environment(&[("WEIR_JWKS_URL", url)]));
    for url in
        ["https://login.example/keys", "http://127.0.0.1:1/k", "http://[::1]/", "http://localhost:8080/k"]
    {
        assert_eq!(read(url).unwrap().auth.jwks_url.unwrap().as_str(), url);
    }
    assert_eq!(read("").unwrap().auth.jwks_url, None);
    for url in [
        "http://login.example/keys",
        "http://10.0.0.1/",
        "http://localhost.example/",
        "file:///keys",
        "ftp://localhost/",
    ] {
        let sentence = read(url).unwrap_err().to_string();
        assert!(sentence.contains("WEIR_JWKS_URL") && sentence.contains(url), "{sentence}");
    }
    let sentence = read("http://user:hunter2@login.example/").unwrap_err().to_string();
    assert!(!sentence.contains("hunter2"), "{sentence}");
    let both = [("WEIR_JWKS_URL", "https://login.example/keys"), ("WEIR_JWKS_FILE", "keys.json")];
    let sentence = Settings::read(environment(&both)).unwrap_err().to_string();
    assert!(sentence.contains("WEIR_JWKS_URL") && sentence.contains("WEIR_JWKS_FILE"), "{sentence}");
}

#[test]
fn lists_and_numbers_in_the_file_read_like_their_text() {
    let settings = Settings::read(file("roles = [\"api\", \"sender\"]\n[lane]\ncapacity = 7")).unwrap();
    assert!(settings.process.roles.sender && !settings.process.roles.worker);
    assert_eq!(settings.lane.capacity, 7);
}

#[test]
fn unknown_variables_are_listed_and_ignored() {
    let settings = Settings::read(environment(&[("WEIR_LISTNE", "x"), ("WEIR_TEST_SKIP", "y")])).unwrap();
    assert_eq!(settings.unknown_variables, ["WEIR_LISTNE"]);
}

#[test]
fn http_limits_that_contradict_each_other_are_refused() {
    for (text, name) in [
        ("[http]\nmax_body = \"2MiB\"\nmax_buffered = \"3MiB\"", "http.max_buffered"),
        ("[http]\nmax_connections = 10\nmax_streams = 11", "http.max_streams"),
    ] {
        let sentence = Settings::read(file(text)).unwrap_err().to_string();
        assert!(sentence.starts_with(name), "{sentence}");
    }
    let settings = Settings::read(file("[http]\nmax_connections = 100\nmax_body = \"100MiB\"")).unwrap();
    assert_eq!((settings.http.max_streams, settings.http.max_buffered), (75, 400 << 20));
}

#[test]
fn tls_needs_both_files() {
    let read = |pairs: &[(&str, &str)]| Settings::read(environment(pairs));
    assert_eq!(read(&[]).unwrap().tls, None);
    let (cert, key, ca) =
        (("WEIR_TLS_CERT", "c.pem"), ("WEIR_TLS_KEY", "k.pem"), ("WEIR_TLS_CLIENT_CA", "ca.pem"));
    let settings = read(&[cert, key, ca]).unwrap();
    assert_eq!(settings.unknown_variables, [""; 0]);
    let expected =
        tls::TlsSettings { cert: "c.pem".into(), key: "k.pem".into(), client_ca: Some("ca.pem".into()) };
    assert_eq!(settings.tls, Some(expected.clone()));
    let text = "[http.tls]\ncert = \"c.pem\"\nkey = \"k.pem\"\nclient_ca = \"ca.pem\"";
    assert_eq!(Settings::read(file(text)).unwrap().tls, Some(expected));
    for (only, missing) in
        [(cert, "http.tls.key"), (key, "http.tls.cert"), (ca, "http.tls.cert (WEIR_TLS_CERT)")]
    {
        let sentence = read(&[only]).unwrap_err().to_string();
        assert!(sentence.contains(only.0) && sentence.contains(missing), "{sentence}");
    }
}
