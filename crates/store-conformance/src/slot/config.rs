//! Configs, and how a new version affects windows that have slots.

use weir_core::slot::WindowStatus;

use super::fixtures::{
    assign, assign_new, assignment, assignments, at, counters, expect_books, name, pace, put_config,
    window_starts,
};
use crate::HasSlots;
use weir_store::slot::AssignOutcome;

pub async fn a_config_has_versions_and_the_last_one_is_active<H: HasSlots>() {
    let h = H::open().await;
    assert_eq!(h.slots().config(&name("default")).await.expect("an answer"), None);
    let first = put_config(&h, pace(100, 4_000)).await;
    let second = put_config(&h, pace(50, 4_000)).await;
    assert_eq!((first.version, second.version), (1, 2));
    let active = h.slots().config(&name("default")).await.expect("an answer").expect("a config");
    assert_eq!((active.version, active.pace), (2, pace(50, 4_000)));
}

pub async fn a_deactivated_config_is_unknown_until_it_is_put_again<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    assign_new(&h, assignments("a", 1, at(0))).await;
    assert!(h.slots().deactivate(&name("default")).await.expect("an answer"));
    assert!(!h.slots().deactivate(&name("default")).await.expect("an answer"), "it is deactivated already");
    assert_eq!(h.slots().config(&name("default")).await.expect("an answer"), None);
    let outcomes = assign(&h, vec![assignment("b-0", at(0)), assignment("a-0", at(0))]).await;
    assert!(
        matches!(outcomes[..], [AssignOutcome::UnknownConfig, AssignOutcome::Existing(_)]),
        "{outcomes:?}"
    );
    assert_eq!(put_config(&h, pace(2, 1_000)).await.version, 2);
    let slots = assign_new(&h, assignments("c", 2, at(0))).await;
    assert_eq!(window_starts(&slots), [0, 1_000], "slots from before still count");
}

pub async fn the_versions_of_a_config_are_listed_newest_first<H: HasSlots>() {
    let h = H::open().await;
    let list = async |before: Option<u32>, limit| -> Vec<(u32, u32, bool)> {
        let listed = h.slots().config_versions(&name("default"), before, limit).await;
        let versions = listed.expect("config_versions must succeed").into_iter();
        versions
            .map(|version| (version.config.version, version.config.pace.max_per_window(), version.is_active))
            .collect()
    };
    assert_eq!(list(None, 10).await, []);
    h.slots().put_config(&name("another"), pace(9, 1_000)).await.expect("put_config must succeed");
    for max in [5, 6, 7] {
        put_config(&h, pace(max, 1_000)).await;
    }
    assert_eq!(list(None, 10).await, [(3, 7, true), (2, 6, false), (1, 5, false)]);
    assert_eq!(list(None, 1).await, [(3, 7, true)]);
    assert_eq!(list(Some(3), 1).await, [(2, 6, false)]);
    assert_eq!(list(Some(1), 10).await, []);
    h.slots().deactivate(&name("default")).await.expect("an answer");
    assert_eq!(list(None, 1).await, [(3, 7, false)], "versions are kept");
}

pub async fn configs_are_listed_by_name<H: HasSlots>() {
    let h = H::open().await;
    for text in ["b", "a", "c"] {
        h.slots().put_config(&name(text), pace(1, 1_000)).await.expect("put_config must succeed");
    }
    h.slots().deactivate(&name("b")).await.expect("an answer");
    let list = async |after: Option<&str>, limit| -> Vec<String> {
        let after = after.map(name);
        let configs = h.slots().configs(after.as_ref(), limit).await.expect("configs must succeed");
        configs.iter().map(|config| config.name.to_string()).collect()
    };
    assert_eq!(list(None, 10).await, ["a", "c"]);
    assert_eq!(list(None, 1).await, ["a"]);
    assert_eq!(list(Some("a"), 10).await, ["c"]);
}

pub async fn a_raised_maximum_reopens_full_windows<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    assign_new(&h, assignments("a", 6, at(0))).await;
    assert_eq!(counters(&h).await[&0], (2, WindowStatus::Closed));
    put_config(&h, pace(3, 1_000)).await;
    assert_eq!(counters(&h).await[&0], (2, WindowStatus::Open));
    let slots = assign_new(&h, assignments("b", 4, at(0))).await;
    assert_eq!(window_starts(&slots), [0, 1_000, 2_000, 3_000]);
    expect_books(&h, 10).await;
}

pub async fn a_lowered_maximum_closes_windows_and_revokes_no_slot<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(4, 1_000)).await;
    assign_new(&h, assignments("a", 10, at(0))).await;
    put_config(&h, pace(2, 1_000)).await;
    let counted = counters(&h).await;
    assert_eq!((counted[&0], counted[&2_000]), ((4, WindowStatus::Closed), (2, WindowStatus::Closed)));
    let slots = assign_new(&h, assignments("b", 3, at(0))).await;
    assert_eq!(window_starts(&slots), [3_000, 3_000, 4_000]);
    expect_books(&h, 13).await;
}

pub async fn a_new_size_counts_what_is_already_scheduled_in_each_window<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    // Two slots in each of four seconds.
    assign_new(&h, assignments("a", 8, at(0))).await;
    put_config(&h, pace(5, 2_000)).await;
    let counted = counters(&h).await;
    assert_eq!((counted[&0], counted[&2_000]), ((4, WindowStatus::Open), (4, WindowStatus::Open)));
    let slots = assign_new(&h, assignments("b", 3, at(0))).await;
    assert_eq!(window_starts(&slots), [0, 2_000, 4_000]);
    expect_books(&h, 11).await;
    put_config(&h, pace(1, 500)).await;
    expect_books(&h, 11).await;
}
