//! Generates the gRPC messages and service from `proto/`, without protoc, and embeds the sale page, `web/dist`, if it has been
//! built. It never builds the page itself, so that Weir builds on a machine without Node; the server then says how to get the
//! page.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    generate_grpc()?;
    embed_page()
}

fn generate_grpc() -> io::Result<()> {
    println!("cargo::rerun-if-changed=proto");
    let files =
        protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"]).map_err(io::Error::other)?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .codec_path("crate::grpc::codec::ServerCodec")
        .compile_fds(files)
}

fn embed_page() -> io::Result<()> {
    let web = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../../web");
    let dist = web.join("dist");
    // Cargo treats a missing path as always changed, so this file is watched instead. Building the page touches it.
    let watched = if dist.is_dir() { dist.clone() } else { PathBuf::from("build.rs") };
    println!("cargo::rerun-if-changed={}", watched.display());
    let mut files = Vec::new();
    if dist.join("index.html").is_file() {
        collect(&dist, "", &mut files)?;
    }
    files.sort();
    let mut list = String::from("&[\n");
    for (name, path) in &files {
        // Writing to memory cannot fail.
        let _ = writeln!(list, "    ({name:?}, include_bytes!({:?})),", path.display().to_string());
    }
    list.push(']');
    fs::write(PathBuf::from(env::var("OUT_DIR").unwrap_or_default()).join("page.rs"), list)
}

/// Collects the files of a folder with their names relative to `dist`.
fn collect(folder: &Path, prefix: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push((name, fs::canonicalize(entry.path())?));
        }
    }
    Ok(())
}
