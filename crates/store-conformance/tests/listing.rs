//! A case that is written but not listed would never run.

use std::fs;
use std::path::Path;

const CASE_BEGINS: &str = "pub async fn ";
const CASE_ENDS: &str = "<H: Harness>() {";

#[test]
fn the_suite_lists_every_case() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let list = fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut cases = 0;
    for file in fs::read_dir(&src).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        let text = fs::read_to_string(&file).unwrap();
        let names = text.lines().filter_map(|line| line.strip_prefix(CASE_BEGINS)?.strip_suffix(CASE_ENDS));
        for name in names {
            cases += 1;
            let listed = list.lines().any(|line| line.trim() == format!("{name},"));
            assert!(listed, "{name} in {} must be listed in suite!", file.display());
        }
    }
    assert!(cases > 90, "only {cases} cases were found: has their form changed?");
}
