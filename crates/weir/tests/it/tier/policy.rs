//! Policies: their kinds, fields, keys and the settings file.

use serde_json::{Value, json};

use super::fixtures::{check_one, expect_error, put_policy, remaining, slow_bucket};
use crate::fixtures::{Running, Store, on_each_engine};

fn one_of_each_kind() -> [Value; 3] {
    [
        json!({"kind": "fixed_window", "limit": 5, "window": "PT1M"}),
        json!({"kind": "token_bucket", "capacity": 5, "refill": 5, "period": "PT1M"}),
        json!({"kind": "sliding_window", "limit": 5, "window": "PT1M"}),
    ]
}

async fn a_policy_reads_back_as_it_was_put(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    for (n, form) in one_of_each_kind().into_iter().enumerate() {
        let path = format!("/admin/policies/p{n}");
        let mut expected = form.clone();
        expected["name"] = json!(format!("p{n}"));
        expected["shadow"] = json!(false);
        expected["onOutage"] = json!("local");
        assert_eq!(operator.put(&path, &form).await.unwrap().json(), expected);
        assert_eq!(operator.get(&path).await.unwrap().json(), expected);
    }
    let rich = json!({"kind": "sliding_window", "limit": 7, "window": "PT0.25S", "shadow": true, "onOutage": "closed",
        "match": {"domain": "edge", "entries": {"remote_address": "*", "path": "/login"}}});
    let put = operator.put("/admin/policies/a%2Fb%20c", &rich).await.unwrap().json();
    let mut expected = rich;
    expected["name"] = json!("a/b c");
    assert_eq!(put, expected);
    assert_eq!(operator.get("/admin/policies/a%2Fb%20c").await.unwrap().json(), expected);
    let first = operator.get("/admin/policies?limit=3").await.unwrap().json();
    let names = |page: &Value| -> Vec<String> {
        page["items"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        (names(&first), &first["nextCursor"]),
        (vec!["a/b c".into(), "p0".into(), "p1".into()], &json!("p1"))
    );
    let last = operator.get("/admin/policies?limit=3&cursor=p1").await.unwrap().json();
    assert_eq!((names(&last), &last["nextCursor"]), (vec!["p2".into()], &Value::Null));
    assert_eq!(operator.delete("/admin/policies/p0").await.unwrap().status, 204);
    for response in [
        operator.get("/admin/policies/p0").await.unwrap(),
        operator.delete("/admin/policies/p0").await.unwrap(),
    ] {
        expect_error(&response, 404, "NOT_FOUND", "p0");
    }
}

async fn an_invalid_field_is_400_and_named(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    let with = |mut form: Value, field: &str, value: Value| {
        form[field] = value;
        form
    };
    let [fixed, bucket, _] = one_of_each_kind();
    let mut cases = vec![
        (json!({}), "kind"),
        (json!({"kind": "leaky", "limit": 5, "window": "PT1M"}), "kind"),
        (json!({"kind": "fixed_window", "window": "PT1M"}), "limit"),
        (json!({"kind": "fixed_window", "limit": 5}), "window"),
        (json!({"kind": "token_bucket", "capacity": 5, "refill": 5}), "period"),
        (with(fixed.clone(), "capacity", json!(5)), "capacity"),
        (with(fixed.clone(), "shadow", json!("yes")), "shadow"),
        (with(fixed.clone(), "onOutage", json!("ajar")), "onOutage"),
        (with(fixed.clone(), "match", json!({"domain": "", "entries": {"a": "*"}})), "match"),
        (with(fixed.clone(), "match", json!({"domain": "d", "entries": {}})), "match"),
        (with(fixed.clone(), "match", json!({"domain": "d"})), "entries"),
        (with(fixed.clone(), "limits", json!(5)), "limits is not a field"),
        (with(fixed.clone(), "on_outage", json!("open")), "on_outage is not a field"),
        (with(fixed.clone(), "name", json!("p")), "name is not a field"),
        (
            with(fixed.clone(), "match", json!({"domain": "d", "entries": {"a": "*"}, "entry": 1})),
            "match.entry is not a field",
        ),
    ];
    for bad in
        [json!(0), json!(-1), json!(1.5), json!("5"), json!(true), json!(2_147_483_648_u64), json!(u64::MAX)]
    {
        cases.push((with(fixed.clone(), "limit", bad.clone()), "limit"));
        cases.push((with(bucket.clone(), "capacity", bad.clone()), "capacity"));
        cases.push((with(bucket.clone(), "refill", bad), "refill"));
    }
    for bad in ["", "1m", "P1M", "PT0S", "PT0.0001S", "P400D", "-PT1M"] {
        cases.push((with(fixed.clone(), "window", json!(bad)), "window"));
        cases.push((with(bucket.clone(), "period", json!(bad)), "period"));
    }
    for (body, field) in cases {
        let response = operator.put("/admin/policies/p", &body).await.unwrap();
        assert_eq!(response.status, 400, "{body}");
        expect_error(&response, 400, "INVALID_REQUEST", field);
    }
    assert_eq!(operator.get("/admin/policies/p").await.unwrap().status, 404, "nothing of that was saved");
    let long = "x".repeat(256);
    let response = operator.put(&format!("/admin/policies/{long}"), &fixed).await.unwrap();
    expect_error(&response, 400, "INVALID_REQUEST", "name");
}

async fn spent_amounts_survive_a_change_of_the_policy_but_not_its_deletion(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(5)).await;
    check_one(&operator, "p", "k", 3).await;
    put_policy(&operator, "p", json!({"kind": "fixed_window", "limit": 10, "window": "P1D"})).await;
    assert_eq!(remaining(&operator, "p", "k").await, 7);
    assert_eq!(operator.delete("/admin/policies/p/keys/k").await.unwrap().status, 204);
    assert_eq!(remaining(&operator, "p", "k").await, 10);
    check_one(&operator, "p", "k", 3).await;
    assert_eq!(operator.delete("/admin/policies/p").await.unwrap().status, 204);
    let deleted =
        operator.post("/v1/check", &json!({"checks": [{"policy": "p", "key": "k"}]})).await.unwrap();
    expect_error(&deleted, 404, "NOT_FOUND", "p");
    expect_error(&operator.delete("/admin/policies/p/keys/k").await.unwrap(), 404, "NOT_FOUND", "p");
    put_policy(&operator, "p", slow_bucket(5)).await;
    assert_eq!(remaining(&operator, "p", "k").await, 5, "one of the same name is another policy");
}

on_each_engine!(
    a_policy_reads_back_as_it_was_put,
    an_invalid_field_is_400_and_named,
    spent_amounts_survive_a_change_of_the_policy_but_not_its_deletion,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_of_a_settings_file_are_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("weir.toml");
    let text = "[policies.login]\nkind = \"sliding_window\"\nlimit = 5\nwindow = \"PT1M\"\non_outage = \"closed\"\n\
        [policies.login.match]\ndomain = \"edge\"\n[policies.login.match.entries]\nremote_address = \"*\"\n";
    std::fs::write(&file, text).unwrap();
    let server = Running::start_with(Store::Embedded, &[("WEIR_CONFIG", file.to_str().unwrap())]).await;
    let policy = server.operator().get("/admin/policies/login").await.unwrap().json();
    let expected = json!({"name": "login", "kind": "sliding_window", "limit": 5, "window": "PT1M", "shadow": false,
        "onOutage": "closed", "match": {"domain": "edge", "entries": {"remote_address": "*"}}});
    assert_eq!(policy, expected);
}
