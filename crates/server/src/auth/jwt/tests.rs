use super::*;

const SECRET: &str = "0123456789abcdef0123456789abcdef";
const FAR_FUTURE: u64 = 4_000_000_000;

/// Keys that were generated for these tests only.
const EC_PRIVATE: &[u8] = include_bytes!("testdata/ec.private.pem");
const RSA_PRIVATE: &[u8] = include_bytes!("testdata/rsa.private.pem");
const JWKS: &str = include_str!("testdata/jwks.json");

fn claims(exp: u64) -> Claims {
    Claims { sub: "a@b.c".into(), exp, tenant_id: Some("acme".into()), scope: Some("requests:read x".into()) }
}

fn from_secret(secret: &str) -> TokenVerifier {
    TokenVerifier::from_secret(secret, &RequiredClaims::default())
}

fn jwks_verifier() -> TokenVerifier {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), JWKS).unwrap();
    TokenVerifier::from_jwks_file(file.path(), &RequiredClaims::default()).unwrap()
}

#[test]
fn a_signed_token_verifies() {
    let token = sign(SECRET, &claims(FAR_FUTURE)).unwrap();
    let verified = from_secret(SECRET).verify(&token).unwrap();
    assert_eq!(**verified, claims(FAR_FUTURE));
    assert!(verified.allows("requests:read") && !verified.allows("requests") && !verified.allows(""));
}

#[test]
fn expired_forged_and_unsigned_tokens_are_refused() {
    let verifier = from_secret(SECRET);
    assert!(verifier.verify(&sign(SECRET, &claims(1_000_000)).unwrap()).is_none(), "expired");
    assert!(
        verifier.verify(&sign("another secret, also 32 bytes...", &claims(FAR_FUTURE)).unwrap()).is_none(),
        "forged"
    );
    let part = |json: &str| URL_SAFE_NO_PAD.encode(json);
    let body = part(r#"{"sub":"a","exp":4000000000}"#);
    for header in [r#"{"alg":"none"}"#, r#"{"alg":"HS256"}"#, r#"{"alg":"HS384"}"#] {
        for signature in ["", "AAAA"] {
            assert!(verifier.verify(&format!("{}.{body}.{signature}", part(header))).is_none(), "{header}");
        }
    }
    for garbage in ["", ".", "..", "a.b.c", "\u{0}"] {
        assert!(verifier.verify(garbage).is_none());
    }
}

#[test]
fn the_plan_of_a_token_is_that_of_the_named_claim() {
    let claim = "https://shop.example/plan";
    let required = RequiredClaims { plan_claim: Some(claim.to_owned()), ..RequiredClaims::default() };
    let (with_claim, without) = (TokenVerifier::from_secret(SECRET, &required), from_secret(SECRET));
    let long = "x".repeat(PLAN_MAX + 1);
    for (value, plan) in [
        (serde_json::json!("PRO_MONTHLY"), Some("PRO_MONTHLY")),
        (serde_json::json!(""), Some("")),
        (serde_json::json!(null), None),
        (serde_json::json!(["PRO_MONTHLY"]), Some("[\"PRO_MONTHLY\"]")),
        (serde_json::json!(long), Some(&long[1..])),
    ] {
        let body =
            serde_json::json!({"sub": "a", "exp": FAR_FUTURE, claim: value, "plan": "BUSINESS_YEARLY"});
        let key = EncodingKey::from_secret(SECRET.as_bytes());
        let token = encode(&Header::new(Algorithm::HS256), &body, &key).unwrap();
        for _ in 0..2 {
            assert_eq!(with_claim.verify(&token).unwrap().plan.as_deref(), plan, "{value}");
        }
        assert_eq!(without.verify(&token).unwrap().plan, None);
    }
    let token = sign(SECRET, &claims(FAR_FUTURE)).unwrap();
    assert_eq!(with_claim.verify(&token).unwrap().plan, None);
}

#[test]
fn a_token_that_is_not_yet_valid_or_lacks_exp_or_sub_is_refused() {
    let verifier = from_secret(SECRET);
    let signed = |json: serde_json::Value| {
        encode(&Header::new(Algorithm::HS256), &json, &EncodingKey::from_secret(SECRET.as_bytes())).unwrap()
    };
    assert!(verifier.verify(&signed(serde_json::json!({"sub": "a", "exp": FAR_FUTURE}))).is_some());
    assert!(
        verifier
            .verify(&signed(serde_json::json!({"sub": "a", "exp": FAR_FUTURE, "nbf": FAR_FUTURE})))
            .is_none()
    );
    assert!(
        verifier
            .verify(&signed(serde_json::json!({"sub": "a", "exp": FAR_FUTURE, "iat": FAR_FUTURE})))
            .is_none()
    );
    assert!(
        verifier
            .verify(&signed(serde_json::json!({"sub": "a", "exp": FAR_FUTURE, "iat": 1_700_000_000.5})))
            .is_some()
    );
    assert!(verifier.verify(&signed(serde_json::json!({"sub": "a"}))).is_none());
    assert!(verifier.verify(&signed(serde_json::json!({"exp": FAR_FUTURE}))).is_none());
}

fn signed(header: &Header, json: &serde_json::Value) -> String {
    encode(header, json, &EncodingKey::from_secret(SECRET.as_bytes())).unwrap()
}

#[test]
fn times_may_have_a_fraction() {
    let verifier = from_secret(SECRET);
    let header = Header::new(Algorithm::HS256);
    let now = jiff::Timestamp::now().as_second() as f64;
    let verify = |exp: serde_json::Value, nbf: f64| {
        let body = serde_json::json!({"sub": "a", "exp": exp, "nbf": nbf, "iat": now - 1.5});
        verifier.verify(&signed(&header, &body))
    };
    assert_eq!(verify(4_000_000_000.75.into(), now - 10.5).unwrap().exp, FAR_FUTURE);
    assert!(verify((now + 60.5).into(), now - 10.5).is_some());
    assert!(verify((now - 60.5).into(), now - 100.5).is_none(), "expired");
    assert!(verify((now + 600.5).into(), now + 60.5).is_none(), "not yet valid");
    for odd in [serde_json::json!("4000000000"), serde_json::json!(-0.5), serde_json::json!(1e300)] {
        assert!(verify(odd.clone(), now - 10.0).is_none(), "{odd}");
    }
}

#[test]
fn scopes_are_a_text_or_a_list() {
    let verifier = from_secret(SECRET);
    let with = |scope: serde_json::Value| {
        let body = serde_json::json!({"sub": "a", "exp": FAR_FUTURE, "scope": scope});
        verifier.verify(&signed(&Header::new(Algorithm::HS256), &body))
    };
    for scope in [serde_json::json!("x requests:read"), serde_json::json!(["requests:read", "x"])] {
        let claims = with(scope.clone()).unwrap();
        assert!(
            claims.allows("requests:read") && claims.allows("x") && !claims.allows("requests"),
            "{scope}"
        );
    }
    for none in [
        serde_json::json!(null),
        serde_json::json!([]),
        serde_json::json!(""),
        serde_json::json!(["x admin"]),
    ] {
        assert!(!with(none.clone()).unwrap().allows("admin"), "{none}");
    }
    for odd in [serde_json::json!(7), serde_json::json!({"admin": true}), serde_json::json!(["admin", 7])] {
        assert!(with(odd.clone()).is_none(), "{odd}");
    }
}

#[test]
fn a_token_with_critical_extensions_is_refused() {
    let verifier = from_secret(SECRET);
    let body = serde_json::json!({"sub": "a", "exp": FAR_FUTURE});
    let with = |crit: Option<Vec<String>>| Header { crit, ..Header::new(Algorithm::HS256) };
    assert!(verifier.verify(&signed(&with(None), &body)).is_some());
    for crit in [vec!["b64".to_owned()], vec!["exp".to_owned()], vec![]] {
        assert!(verifier.verify(&signed(&with(Some(crit.clone())), &body)).is_none(), "{crit:?}");
    }
}

#[test]
fn a_required_issuer_and_audience_must_be_named() {
    let verifier = |issuer: Option<&str>, audience: Option<&str>| {
        let [issuer, audience] = [issuer, audience].map(|text| text.map(str::to_owned));
        TokenVerifier::from_secret(SECRET, &RequiredClaims { issuer, audience, plan_claim: None })
    };
    let token = |more: serde_json::Value| {
        let mut body = serde_json::json!({"sub": "a", "exp": FAR_FUTURE});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        signed(&Header::new(Algorithm::HS256), &body)
    };
    let both = verifier(Some("https://login.example"), Some("weir"));
    for (claims, is_valid) in [
        (serde_json::json!({"iss": "https://login.example", "aud": "weir"}), true),
        (serde_json::json!({"iss": "https://login.example", "aud": ["other", "weir"]}), true),
        (serde_json::json!({"iss": "https://login.example", "aud": ["other"]}), false),
        (serde_json::json!({"iss": "https://login.example", "aud": "other"}), false),
        (serde_json::json!({"iss": "https://login.example", "aud": []}), false),
        (serde_json::json!({"iss": "https://login.example", "aud": 7}), false),
        (serde_json::json!({"iss": "https://login.example"}), false),
        (serde_json::json!({"iss": "https://login.example/", "aud": "weir"}), false),
        (serde_json::json!({"aud": "weir"}), false),
        (serde_json::json!({}), false),
    ] {
        assert_eq!(both.verify(&token(claims.clone())).is_some(), is_valid, "{claims}");
    }
    let anybody = serde_json::json!({"iss": "x", "aud": ["y"]});
    assert!(verifier(None, None).verify(&token(anybody.clone())).is_some());
    assert!(verifier(Some("x"), None).verify(&token(anybody.clone())).is_some());
    assert!(verifier(None, Some("y")).verify(&token(anybody)).is_some());
    let own = sign_for(SECRET, &claims(FAR_FUTURE), Some("https://login.example"), Some("weir")).unwrap();
    assert_eq!(both.verify(&own).as_deref().map(|verified| &**verified), Some(&claims(FAR_FUTURE)));
}

#[test]
fn keys_of_a_file_verify_only_their_own_algorithm() {
    let verifier = jwks_verifier();
    let mut header = Header::new(Algorithm::ES256);
    let ec = EncodingKey::from_ec_pem(EC_PRIVATE).unwrap();
    assert!(verifier.verify(&encode(&header, &claims(FAR_FUTURE), &ec).unwrap()).is_some());
    header.kid = Some("ec-1".into());
    assert!(verifier.verify(&encode(&header, &claims(FAR_FUTURE), &ec).unwrap()).is_some());
    header.kid = Some("rsa-1".into());
    assert!(
        verifier.verify(&encode(&header, &claims(FAR_FUTURE), &ec).unwrap()).is_none(),
        "another key's name"
    );
    let rsa = EncodingKey::from_rsa_pem(RSA_PRIVATE).unwrap();
    assert!(
        verifier
            .verify(&encode(&Header::new(Algorithm::RS256), &claims(FAR_FUTURE), &rsa).unwrap())
            .is_some()
    );
    assert!(
        verifier
            .verify(&encode(&Header::new(Algorithm::RS512), &claims(FAR_FUTURE), &rsa).unwrap())
            .is_none()
    );
}

#[test]
fn a_public_key_is_not_taken_for_a_shared_secret() {
    // The classic attack: an HS256 token "signed" with the bytes of the public key.
    let token = sign(JWKS, &claims(FAR_FUTURE)).unwrap();
    assert!(jwks_verifier().verify(&token).is_none());
}

#[test]
fn a_file_without_keys_is_refused_with_the_name_of_the_setting() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for text in ["", "{}", r#"{"keys":[]}"#] {
        std::fs::write(file.path(), text).unwrap();
        let sentence =
            TokenVerifier::from_jwks_file(file.path(), &RequiredClaims::default()).unwrap_err().to_string();
        assert!(sentence.contains("WEIR_JWKS_FILE"), "{sentence}");
    }
}

#[test]
fn a_verified_token_does_not_make_others_valid() {
    let verifier = from_secret(SECRET);
    let genuine = sign(SECRET, &claims(FAR_FUTURE)).unwrap();
    for _ in 0..2 {
        assert_eq!(
            verifier.verify(&genuine).as_deref().map(|verified| &**verified),
            Some(&claims(FAR_FUTURE))
        );
    }
    let (payload, signature) = genuine.rsplit_once('.').unwrap();
    let forged = sign("another secret of 32 bytes or more", &claims(FAR_FUTURE)).unwrap();
    let (_, other) = forged.rsplit_once('.').unwrap();
    assert_eq!(verifier.verify(&format!("{payload}.{other}")), None);
    assert_eq!(verifier.verify(payload), None);
    assert_eq!(verifier.verify(&format!("{payload}.{signature}x")), None);
}
