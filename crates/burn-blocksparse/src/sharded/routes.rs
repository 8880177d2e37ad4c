//! Positions of transferred key blocks: among a device's own blocks, and among those that it receives.

use blocksparse::ShardPlan;

/// Block indices per other device. For each head a device stores its own blocks, then space for those that it receives; the blocks of all heads form one list,
/// head by head. Transferred blocks are ordered by head, then by position in the sequence.
pub struct Routes {
    /// Own blocks to send to each other device.
    pub send: Vec<Vec<i32>>,
    /// Blocks received from each other device.
    pub receive: Vec<Vec<i32>>,
    /// For each slot of a received block its index among all arriving blocks, ordered by device. Empty slots have the index after the last.
    pub places: Vec<i32>,
    /// True if some slots are empty.
    pub has_gaps: bool,
    /// Maximum number of received blocks per head.
    pub most: usize,
}

impl Routes {
    pub fn new(plan: &ShardPlan, rank: usize) -> Self {
        let (devices, b) = (plan.devices(), plan.layout().block_size());
        let own = plan.positions(rank).into_iter();
        let own: Vec<usize> = own
            .flat_map(|range| range.start / b..range.end / b)
            .collect();
        let mut place = vec![0; plan.layout().kv_blocks()];
        for (at, &block) in own.iter().enumerate() {
            place[block] = at;
        }
        let most = plan.blocks_received(rank);
        let of_head = own.len() + most;
        let mut send = vec![Vec::new(); devices];
        let mut receive = vec![Vec::new(); devices];
        // Slots of received blocks per sending device.
        let mut arriving = vec![Vec::new(); devices];
        for head in 0..plan.kv_heads() {
            for (to, send) in send.iter_mut().enumerate() {
                let blocks = plan.crossing(rank, to, head).into_iter().flatten();
                send.extend(blocks.map(|block| (head * of_head + place[block]) as i32));
            }
            let mut blocks: Vec<(usize, usize)> = (0..devices)
                .flat_map(|from| {
                    let blocks = plan.crossing(from, rank, head).into_iter().flatten();
                    blocks.map(move |block| (block, from))
                })
                .collect();
            blocks.sort_unstable();
            for (at, (_, from)) in blocks.into_iter().enumerate() {
                receive[from].push((head * of_head + own.len() + at) as i32);
                arriving[from].push(head * most + at);
            }
        }
        let arriving: Vec<usize> = arriving.into_iter().flatten().collect();
        let mut places = vec![arriving.len() as i32; plan.kv_heads() * most];
        for (number, &place) in arriving.iter().enumerate() {
            places[place] = number as i32;
        }
        Self {
            send,
            receive,
            has_gaps: arriving.len() < places.len(),
            places,
            most,
        }
    }

    /// Returns whether anything is sent or received.
    pub fn cross(&self) -> bool {
        let lists = || self.send.iter().chain(&self.receive);
        lists().any(|numbers| !numbers.is_empty())
    }
}
