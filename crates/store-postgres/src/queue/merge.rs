//! Merges the rows and packs of a claim in the order of their ids.

use std::collections::HashMap;

use weir_queue::Message;

use super::pack::Pack;

/// The most rows and packs that were read from each shard.
pub(super) struct ClaimLimits {
    pub(super) messages: usize,
    pub(super) packs: usize,
}

impl ClaimLimits {
    /// Merges rows and packs shard by shard in the order of their ids. If a shard may have more of one kind, messages of the other
    /// are taken only up to the last one of the first. Returns the cursors of the shards that must be read further.
    pub(super) fn merge(
        &self,
        cursors: &[(i16, i64)],
        rows: Vec<Message>,
        packs: Vec<Pack>,
        messages: &mut Vec<Message>,
    ) -> Vec<(i16, i64)> {
        let mut by_shard: HashMap<i16, (Vec<Message>, Vec<Pack>)> = HashMap::new();
        for row in rows {
            by_shard.entry(row.position.shard.cast_signed()).or_default().0.push(row);
        }
        for pack in packs {
            by_shard.entry(pack.shard).or_default().1.push(pack);
        }
        let mut next = Vec::new();
        for (shard, _) in cursors {
            let Some((rows, packs)) = by_shard.remove(shard) else { continue };
            let last_row = rows.last().filter(|_| rows.len() >= self.messages).map(|row| row.position.id);
            let last_pack = packs.last().filter(|_| packs.len() >= self.packs).map(|pack| pack.ids.end - 1);
            let end = [last_row, last_pack].into_iter().flatten().min();
            let packed = packs.into_iter().flat_map(|pack| pack.messages);
            let from = messages.len();
            messages.extend(
                rows.into_iter()
                    .chain(packed)
                    .filter(|message| end.is_none_or(|end| message.position.id <= end)),
            );
            messages[from..].sort_unstable_by_key(|message| message.position.id);
            next.extend(end.map(|end| (*shard, end)));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use weir_queue::Position;

    use super::*;

    fn message(shard: u16, id: i64) -> Message {
        Message {
            position: Position { shard, id },
            key: String::new(),
            payload: Vec::new(),
            attempts: 0,
            trace: None,
        }
    }

    fn pack(shard: u16, ids: std::ops::Range<i64>) -> Pack {
        let messages = ids.clone().map(|id| message(shard, id)).collect();
        Pack { shard: shard.cast_signed(), ids, messages, has_delayed: false }
    }

    /// The messages, and the cursors of the shards that must be read further.
    type Merged = (Vec<(u16, i64)>, Vec<(i16, i64)>);

    fn merged(limits: &ClaimLimits, rows: &[(u16, i64)], packs: Vec<Pack>) -> Merged {
        let rows = rows.iter().map(|(shard, id)| message(*shard, *id)).collect();
        let mut messages = Vec::new();
        let next = limits.merge(&[(0, i64::MIN), (1, i64::MIN)], rows, packs, &mut messages);
        (messages.iter().map(|message| (message.position.shard, message.position.id)).collect(), next)
    }

    #[test]
    fn rows_and_packs_are_merged_in_the_order_of_their_ids() {
        let limits = ClaimLimits { messages: 10, packs: 10 };
        let packs = vec![pack(0, 5..7), pack(0, 20..21), pack(1, 1..2)];
        let (messages, next) = merged(&limits, &[(0, 1), (0, 9), (1, 3)], packs);
        assert_eq!(messages, [(0, 1), (0, 5), (0, 6), (0, 9), (0, 20), (1, 1), (1, 3)]);
        assert!(next.is_empty());
    }

    #[test]
    fn messages_behind_an_incomplete_kind_wait_for_the_next_claim() {
        let (messages, next) = merged(
            &ClaimLimits { messages: 2, packs: 10 },
            &[(0, 1), (0, 9)],
            vec![pack(0, 5..7), pack(0, 20..21)],
        );
        assert_eq!((messages, next), (vec![(0, 1), (0, 5), (0, 6), (0, 9)], vec![(0, 9)]));
        let (messages, next) =
            merged(&ClaimLimits { messages: 10, packs: 1 }, &[(1, 1), (1, 9)], vec![pack(1, 5..7)]);
        assert_eq!((messages, next), (vec![(1, 1), (1, 5), (1, 6)], vec![(1, 6)]));
    }

    #[test]
    fn a_pack_whose_messages_are_all_held_back_counts_as_read() {
        let mut held_back = pack(0, 5..7);
        held_back.messages.clear();
        let (messages, next) =
            merged(&ClaimLimits { messages: 10, packs: 1 }, &[(0, 1), (0, 9)], vec![held_back]);
        assert_eq!((messages, next), (vec![(0, 1)], vec![(0, 6)]));
    }
}
