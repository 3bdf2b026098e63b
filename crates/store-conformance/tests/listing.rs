//! Every case must be in the list of its capability's macro; one that is missing there would never run.

use std::fs;
use std::path::Path;

const CASE_BEGINS: &str = "pub async fn ";

/// Checks that all cases of this capability are in its list, and that there are at least `at_least`.
fn must_list(capability: &str, fixture: &str, at_least: usize) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let listed = fs::read_to_string(src.join(capability).with_extension("rs")).expect("the list");
    let files = fs::read_dir(src.join(capability)).expect("the cases").flatten().map(|entry| entry.path());
    let ends = format!("<H: {fixture}>() {{");
    let mut cases = 0;
    for file in files {
        let text = fs::read_to_string(&file).expect("a file of cases");
        let names = text.lines().filter_map(|line| line.strip_prefix(CASE_BEGINS)?.strip_suffix(&ends));
        for name in names {
            cases += 1;
            let is_listed = listed.lines().any(|line| line.trim() == format!("{name},"));
            assert!(is_listed, "{name} in {} must be listed in src/{capability}.rs", file.display());
        }
    }
    assert!(cases >= at_least, "only {cases} cases were found: has the form of their declaration changed?");
}

#[test]
fn the_quota_suite_lists_every_case() {
    must_list("quota", "HasQuota", 90);
}

#[test]
fn the_slot_suite_lists_every_case() {
    must_list("slot", "HasSlots", 30);
}

#[test]
fn the_request_suite_lists_every_case() {
    must_list("request", "HasRequests", 110);
}

#[test]
fn the_sale_suite_lists_every_case() {
    must_list("sale", "HasSales", 29);
}

#[test]
fn the_tier_suite_lists_every_case() {
    must_list("tier", "HasLimits", 40);
}
