//! A case that is written but not listed would never run.

use std::fs;
use std::path::Path;

const CASE_BEGINS: &str = "pub async fn ";

/// The cases in these files that belong to engines of this kind are all in the list, and there are some.
fn must_list(list: &str, files: &str, harness: &str, at_least: usize) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let listed = fs::read_to_string(src.join(list)).expect("the list");
    let files = fs::read_dir(src.join(files)).expect("the cases").flatten().map(|entry| entry.path());
    let ends = format!("<H: {harness}>() {{");
    let mut cases = 0;
    for file in files.filter(|path| path.is_file()) {
        let text = fs::read_to_string(&file).expect("a file of cases");
        let names = text.lines().filter_map(|line| line.strip_prefix(CASE_BEGINS)?.strip_suffix(&ends));
        for name in names {
            cases += 1;
            let is_listed = listed.lines().any(|line| line.trim() == format!("{name},"));
            assert!(is_listed, "{name} in {} must be listed in src/{list}", file.display());
        }
    }
    assert!(cases >= at_least, "only {cases} cases were found: has their form changed?");
}

#[test]
fn the_suite_lists_every_case() {
    must_list("lib.rs", "", "Harness", 90);
}

#[test]
fn the_slot_suite_lists_every_case() {
    must_list("slot.rs", "slot", "SlotHarness", 30);
}

#[test]
fn the_request_suite_lists_every_case() {
    must_list("request.rs", "request", "RequestHarness", 110);
}

#[test]
fn the_sale_suite_lists_every_case() {
    must_list("sale.rs", "sale", "SaleHarness", 29);
}

#[test]
fn the_tier_suite_lists_every_case() {
    must_list("tier.rs", "tier", "TierHarness", 40);
}
