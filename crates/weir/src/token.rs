//! `weir token`: prints a token signed with the server's own secret, for experiments and scripts.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use weir_server::auth::jwt::{Claims, sign_for};
use weir_server::auth::jwt_secret;
use weir_server::auth::secrets::JWT_SECRET;
use weir_server::settings::Settings;
use weir_server::settings::source::Sources;

#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct TokenArgs {
    /// The subject of the token, such as a@b.c
    #[arg(long)]
    sub: String,
    /// The tenant whose data it gives access to
    #[arg(long)]
    tenant: Option<String>,
    /// The scopes, any of quota:configure, quota:send, slots:assign, requests:create, requests:read, limits:check, admin,
    /// admin:read
    #[arg(long, value_delimiter = ',')]
    scope: Vec<String>,
    /// How long it is valid
    #[arg(long, default_value = "1h", value_parser = parse_ttl)]
    ttl: Duration,
    /// The server's data directory [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    /// The server's configuration file [env: WEIR_CONFIG] [default: weir.toml if present]
    #[arg(long, value_name = "FILE")]
    config: Option<String>,
}

pub(crate) fn run(arguments: &TokenArgs) -> anyhow::Result<ExitCode> {
    let flags = [("data", &arguments.data), ("config", &arguments.config)]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.clone()?)))
        .collect::<BTreeMap<_, _>>();
    let settings = Settings::read(Sources::from_process(flags)?)?;
    anyhow::ensure!(!arguments.sub.is_empty(), "--sub must not be empty");
    let auth = &settings.auth;
    anyhow::ensure!(
        auth.jwks_file.is_none() && (auth.jwks_url.is_none() || auth.jwt_secret.is_some()),
        "WEIR_JWKS_FILE or WEIR_JWKS_URL is set, so the server accepts only tokens signed with those keys; sign them where \
         the private keys are, or set WEIR_JWT_SECRET beside WEIR_JWKS_URL"
    );
    let data = &settings.process.data;
    anyhow::ensure!(
        settings.auth.jwt_secret.is_some() || data.join(JWT_SECRET.file).exists(),
        "no {} in {}: start the server once, or pass its data directory with --data",
        JWT_SECRET.file,
        data.display()
    );
    let secret = jwt_secret(&settings.auth, data)?;
    let scopes: Vec<&str> = arguments.scope.iter().flat_map(|scope| scope.split_whitespace()).collect();
    let expires = jiff::Timestamp::now() + arguments.ttl;
    let claims = Claims {
        sub: arguments.sub.clone(),
        exp: u64::try_from(expires.as_second())?,
        tenant_id: arguments.tenant.clone(),
        scope: (!scopes.is_empty()).then(|| scopes.join(" ")),
    };
    let token = sign_for(&secret, &claims, auth.issuer.as_deref(), auth.audience.as_deref())
        .context("cannot sign the token")?;
    writeln!(std::io::stdout(), "{token}")?;
    Ok(ExitCode::SUCCESS)
}

fn parse_ttl(text: &str) -> Result<Duration, String> {
    let allowed = || "a duration such as 15m, 1h or 30d".to_owned();
    let span: jiff::Span = text.parse().map_err(|_invalid| allowed())?;
    let span = span.to_duration(jiff::SpanRelativeTo::days_are_24_hours()).map_err(|_calendar| allowed())?;
    Duration::try_from(span).ok().filter(|span| !span.is_zero()).ok_or_else(allowed)
}
