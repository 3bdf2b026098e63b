//! A server without workers, its callers, and changes of requests directly in the store.

use std::time::Duration;

use http::Method;
use rusqlite::types::ValueRef;
use serde_json::{Value, json};
use weir_core::Timestamp;
use weir_core::webhook::{SigningSecret, sign};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};

use crate::fixtures::{FAR_FUTURE, Running, Store, TEST_TIMEOUT};

pub(super) const BOTH: &str = "requests:create requests:read";

/// Encryption keys for servers that share a store.
pub(super) const KEYS: (&str, &str) = ("WEIR_REQUEST_KEYS", "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");

pub(super) struct Api {
    pub(super) running: Running,
}

impl Api {
    pub(super) async fn start(store: Store) -> Self {
        Self::start_with(store, &[]).await
    }

    pub(super) async fn start_with(store: Store, settings: &[(&str, &str)]) -> Self {
        let settings: Vec<_> = settings.iter().copied().chain([("WEIR_ROLES", "api")]).collect();
        Self { running: Running::start_with(store, &settings).await }
    }

    pub(super) fn operator(&self) -> Client {
        self.running.operator()
    }

    /// A client of a tenant with all scopes.
    pub(super) fn caller(&self, tenant: &str) -> Client {
        let claims = Claims {
            sub: "a@b.c".into(),
            exp: FAR_FUTURE,
            tenant_id: Some(tenant.into()),
            scope: Some(BOTH.into()),
        };
        self.bearing(&jwt::sign(&self.secret("jwt.secret"), &claims).unwrap())
    }

    pub(super) fn bearing(&self, token: &str) -> Client {
        self.running.client().with_header("authorization", &format!("Bearer {token}"))
    }

    /// A secret that the server has generated.
    pub(super) fn secret(&self, file: &str) -> String {
        std::fs::read_to_string(self.running.weir.data_dir().join(file)).unwrap()
    }

    /// Submits a body as it is.
    pub(super) async fn submit_text(&self, caller: &Client, text: &str) -> Response {
        let headers = [("content-type", "application/json")];
        caller.request(Method::POST, "/v1/requests", &headers, text.to_owned()).await.unwrap()
    }

    /// Submits a request, and returns its id.
    pub(super) async fn accepted(&self, caller: &Client, key: &str) -> String {
        let answer = submit(caller, &body(key, "pay", json!({"amount": 1, "card": "4111-secret"}))).await;
        assert_eq!(answer.status, 202, "{:?}", answer.body);
        answer.json()["requestId"].as_str().unwrap().to_owned()
    }

    /// Changes a request as a worker does when it starts.
    pub(super) async fn begin(&self, id: &str) {
        self.change(&[
            format!(
                "UPDATE request_record SET status = 'IN_PROGRESS', attempts = 1 WHERE request_id = '{id}'"
            ),
            format!("UPDATE {} SET attempts = 1, token = 1 WHERE request_id = '{id}'", self.jobs()),
        ])
        .await;
    }

    /// The table with the jobs.
    fn jobs(&self) -> &'static str {
        if self.running.database.is_some() { "request_job" } else { "request_record" }
    }

    /// Changes a request as a worker does when its last attempt has failed.
    pub(super) async fn bury(&self, id: &str) {
        let now = if self.running.database.is_some() { "now()" } else { "1767225600000000" };
        self.change(&[
            format!(
                "UPDATE request_record SET status = 'FAILED_RETRY_EXHAUSTED', attempts = 5,
                     failure_code = 'DOWNSTREAM_TIMEOUT', failure_message = 'no answer in time'
                 WHERE request_id = '{id}'"
            ),
            format!(
                "INSERT INTO request_dead (request_id, downstream, token, died_at)
                 SELECT request_id, downstream, 5, {now} FROM {} WHERE request_id = '{id}'",
                self.jobs()
            ),
            match self.running.database {
                Some(_) => format!("DELETE FROM request_job WHERE request_id = '{id}'"),
                None => format!("UPDATE request_record SET claimable_at = NULL WHERE request_id = '{id}'"),
            },
        ])
        .await;
    }

    /// Inserts the dead letter of a message.
    pub(super) async fn bury_message(&self, id: &str) {
        self.bury_message_with(id, "{}").await;
    }

    /// Inserts the dead letter of a message with this payload, which must not contain a quotation mark.
    pub(super) async fn bury_message_with(&self, id: &str, payload: &str) {
        let (shard, now) = match self.running.database {
            Some(_) => ("shard, ", "now()"),
            None => ("", "1767225600000000"),
        };
        let zero = if shard.is_empty() { "" } else { "0, " };
        self.change(&[format!(
            "INSERT INTO dead_letter (id, topic, {shard}message_id, key, payload, reason, attempts, died_at)
             VALUES ('{id}', 'sms-outbound', {zero}1, 'alice', '{payload}', 'malformed', 1, {now})"
        )])
        .await;
    }

    /// Changes a result so that it seems encrypted with a lost key.
    pub(super) async fn lose_key_of_result(&self, id: &str) {
        let lose = format!("UPDATE request_record SET result_key_id = 'lost' WHERE request_id = '{id}'");
        self.change(&[lose]).await;
    }

    async fn change(&self, statements: &[String]) {
        match &self.running.database {
            Some(database) => {
                for statement in statements {
                    database.execute(statement).await;
                }
            }
            None => {
                let file = self.file();
                for statement in statements {
                    file.execute(statement, []).unwrap();
                }
            }
        }
    }

    fn file(&self) -> rusqlite::Connection {
        let file = rusqlite::Connection::open(self.running.weir.data_dir().join("weir.db")).unwrap();
        file.busy_timeout(Duration::from_secs(5)).unwrap();
        file
    }

    /// Whether a stored payload contains these bytes.
    pub(super) async fn stored_bytes_contain(&self, wanted: &[u8]) -> bool {
        if let Some(database) = &self.running.database {
            let rows = database.query_strings("SELECT encode(payload, 'escape') FROM request_record").await;
            assert!(!rows.is_empty());
            let wanted = String::from_utf8_lossy(wanted).into_owned();
            return rows.iter().flatten().flatten().any(|text| text.contains(&wanted));
        }
        let file = self.file();
        let mut statement = file.prepare("SELECT payload FROM request_record").unwrap();
        let payloads = statement.query_map([], |row| row.get::<_, Vec<u8>>(0)).unwrap();
        let payloads: Vec<_> = payloads.map(Result::unwrap).collect();
        assert!(!payloads.is_empty());
        payloads.iter().any(|bytes| bytes.windows(wanted.len()).any(|window| window == wanted))
    }

    /// All rows of the tables of requests and idempotency keys as text, bytes in hexadecimal.
    pub(super) async fn stored_rows(&self) -> String {
        if let Some(database) = &self.running.database {
            let rows = "SELECT request_record::text FROM request_record
                        UNION ALL SELECT idempotency_record::text FROM idempotency_record";
            return database.query_strings(rows).await.into_iter().flatten().flatten().collect();
        }
        let (file, mut text) = (self.file(), String::new());
        for table in ["request_record", "idempotency_record", "idempotency_journal"] {
            let mut statement = file.prepare(&format!("SELECT * FROM {table}")).unwrap();
            let columns = statement.column_count();
            let mut rows = statement.query([]).unwrap();
            while let Some(row) = rows.next().unwrap() {
                for column in 0..columns {
                    match row.get_ref(column).unwrap() {
                        ValueRef::Blob(bytes) => bytes.iter().for_each(|byte| text += &format!("{byte:02x}")),
                        ValueRef::Text(value) => text += &String::from_utf8_lossy(value),
                        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => {}
                    }
                    text.push('\n');
                }
            }
        }
        text
    }

    pub(super) async fn wait_for_log(&self, part: &str) -> String {
        self.running.weir.wait_for_log(|line| line.contains(part), TEST_TIMEOUT).await
    }

    pub(super) fn log_lines(&self) -> Vec<String> {
        self.running.weir.log_lines()
    }

    /// Sends a callback, signed with the server's secret at `sent`. Its `webhook-id` is the request's id.
    pub(super) async fn call_back(&self, id: &str, body: &Value, sent: Timestamp) -> Response {
        self.call_back_as(id, id, body, sent).await
    }

    /// As [`Api::call_back`], with another `webhook-id`.
    pub(super) async fn call_back_as(
        &self,
        id: &str,
        webhook_id: &str,
        body: &Value,
        sent: Timestamp,
    ) -> Response {
        let secret = SigningSecret::parse(self.secret("webhook.secret").trim()).ok().unwrap();
        let signature = sign(&secret, webhook_id, sent, body.to_string().as_bytes());
        let client = self.running.client();
        post_callback(&client, id, webhook_id, &body.to_string(), sent, &signature).await
    }

    pub(super) async fn call_back_signed(
        &self,
        id: &str,
        body: &str,
        sent: Timestamp,
        signature: &str,
    ) -> Response {
        post_callback(&self.running.client(), id, id, body, sent, signature).await
    }
}

/// Sends a callback with this signature.
pub(super) async fn post_callback(
    client: &Client,
    id: &str,
    webhook_id: &str,
    body: &str,
    sent: Timestamp,
    signature: &str,
) -> Response {
    let seconds = weir_core::webhook::timestamp(sent);
    let headers = [
        ("content-type", "application/json"),
        ("webhook-id", webhook_id),
        ("webhook-timestamp", seconds.as_str()),
        ("webhook-signature", signature),
    ];
    let path = format!("/v1/requests/{id}/callback");
    client.request(Method::POST, &path, &headers, body.to_owned()).await.unwrap()
}

pub(super) fn now() -> Timestamp {
    Timestamp::from_micros(jiff::Timestamp::now().as_microsecond())
}

pub(super) fn body(key: &str, kind: &str, payload: Value) -> Value {
    json!({"idempotencyKey": key, "requestType": kind, "payload": payload})
}

pub(super) async fn submit(caller: &Client, body: &Value) -> Response {
    caller.post("/v1/requests", body).await.expect("an answer")
}

pub(super) async fn get(caller: &Client, id: &str) -> Value {
    let answer = caller.get(&format!("/v1/requests/{id}")).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()
}
