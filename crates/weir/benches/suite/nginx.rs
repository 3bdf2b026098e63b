//! The baseline of the gateway: Debian's nginx with a rate limit per caller, in front of the same upstream.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokio::time::sleep;
use weir_bench::resolve;

use crate::process::Process;

const READY_WITHIN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

pub(crate) struct Nginx {
    process: Process,
    pub(crate) url: String,
}

impl Nginx {
    pub(crate) async fn start(directory: &Path, upstream: &str) -> Result<Self> {
        let program = weir_testkit::nginx().map_err(|problem| anyhow!("no nginx: {problem}"))?;
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let port = weir_testkit::ports::unused();
        let config = directory.join("nginx.conf");
        fs::write(&config, configuration(directory, port, upstream)).context("write nginx.conf")?;
        let mut command = Command::new(program);
        command.arg("-p").arg(directory).arg("-c").arg(&config);
        command.arg("-e").arg(directory.join("error.log"));
        let process = Process::spawn(command, directory)?;
        let url = format!("http://127.0.0.1:{port}");
        let deadline = Instant::now() + READY_WITHIN;
        while resolve(&url, false).await.is_err() {
            ensure!(Instant::now() < deadline, "nginx does not listen: {}", process.output());
            sleep(POLL).await;
        }
        Ok(Self { process, url })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.process.stop().await.context("stop nginx")
    }
}

/// A usual configuration for this: one worker per core, keep-alive connections to the upstream, no access log. No run
/// reaches the limit, and there is room for a million callers, as in Weir.
fn configuration(directory: &Path, port: u16, upstream: &str) -> String {
    let directory = directory.display();
    let upstream = upstream.trim_start_matches("http://");
    format!(
        r#"user root;
worker_processes auto;
daemon off;
pid {directory}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    keepalive_requests 100000000;
    limit_req_zone $http_authorization zone=callers:128m rate=1000000r/s;
    upstream ai {{
        server {upstream};
        keepalive 256;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location /api/v1/ai/ {{
            limit_req zone=callers burst=1000000 nodelay;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header X-Forwarded-For $remote_addr;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Host $host;
            proxy_pass http://ai;
        }}
    }}
}}
"#
    )
}
