//! Data exchange between the threads of a warp (PTX ISA, sections 9.7.9.5 and 9.7.13).

use super::warp::each;
use crate::ptx::Lanes;

#[derive(Clone, Copy, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Computes `shfl.sync`: the values that lanes receive, and whether their source was within its segment. The registers of a lane that does not
/// participate are read as they are.
pub fn shuffle(mode: Shuffle, from: &Lanes, by: &Lanes, clamp: &Lanes) -> (Lanes, Lanes) {
    let (mut values, mut valid) = ([0; 32], [0; 32]);
    for lane in 0..32_u64 {
        let (by, clamp) = (by[lane as usize] & 31, clamp[lane as usize]);
        let (segment, bound) = (clamp >> 8 & 31, clamp & 31);
        let (first, last) = (lane & segment, lane & segment | bound & !segment);
        let (source, within) = match mode {
            Shuffle::Up => (
                lane.wrapping_sub(by),
                lane as i64 - by as i64 >= last as i64,
            ),
            Shuffle::Down => (lane + by, lane + by <= last),
            Shuffle::Butterfly => (lane ^ by, lane ^ by <= last),
            Shuffle::Index => (first | by & !segment, first | by & !segment <= last),
        };
        let source = if within { source } else { lane };
        values[lane as usize] = from[source as usize & 31];
        valid[lane as usize] = within.into();
    }
    (values, valid)
}

/// Computes `vote.sync` of the predicates of `members`.
pub fn vote(mode: Vote, from: &Lanes, members: u32) -> u64 {
    let ballot = each(members).fold(0, |ballot, lane| ballot | (from[lane] as u32 & 1) << lane);
    match mode {
        Vote::All => (ballot == members).into(),
        Vote::Any => (ballot != 0).into(),
        Vote::Uniform => (ballot == members || ballot == 0).into(),
        Vote::Ballot => ballot.into(),
    }
}

/// Computes `match.any.sync.b32`: for each lane the members with the same value.
pub fn matching(from: &Lanes, members: u32) -> Lanes {
    std::array::from_fn(|lane| {
        let same = each(members).filter(|&other| from[other] as u32 == from[lane] as u32);
        same.fold(0, |mask, other| mask | 1 << other)
    })
}

/// Computes `movmatrix`: the transpose of a matrix of 8 × 8 16-bit elements. Each lane holds two elements of a row.
pub fn transposed(from: &Lanes) -> Lanes {
    let number =
        |row: usize, column: usize| from[row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff;
    std::array::from_fn(|lane| {
        let (row, column) = (lane / 4, lane % 4 * 2);
        number(column, row) | number(column + 1, row) << 16
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_within_their_segments() {
        let from: Lanes = std::array::from_fn(|lane| lane as u64);
        let all = [31; 32];
        let (values, valid) = shuffle(Shuffle::Up, &from, &[4; 32], &[0; 32]);
        assert_eq!((values[3], valid[3], values[4], valid[4]), (3, 0, 0, 1));
        let (values, valid) = shuffle(Shuffle::Down, &from, &[4; 32], &all);
        assert_eq!(
            (values[27], valid[27], values[28], valid[28]),
            (31, 1, 28, 0)
        );
        // Segments of eight lanes.
        let segments = [(24 << 8) | 31; 32];
        let (values, _) = shuffle(Shuffle::Index, &from, &[2; 32], &segments);
        assert_eq!([values[1], values[9], values[31]], [2, 10, 26]);
        let (values, _) = shuffle(Shuffle::Butterfly, &from, &[1; 32], &all);
        assert_eq!([values[0], values[31]], [1, 30]);
    }

    #[test]
    fn votes_are_of_members() {
        let from: Lanes = std::array::from_fn(|lane| u64::from(lane < 2));
        assert_eq!(vote(Vote::All, &from, 3), 1);
        assert_eq!(vote(Vote::All, &from, 7), 0);
        assert_eq!(vote(Vote::Ballot, &from, 6), 2);
        assert_eq!(matching(&from, 7)[2], 4);
    }

    #[test]
    fn a_matrix_transposed_twice_is_itself() {
        let from: Lanes = std::array::from_fn(|lane| lane as u64 * 0x1_0003);
        assert_ne!(transposed(&from), from);
        assert_eq!(
            transposed(&transposed(&from)),
            from.map(|x| x & 0xffff_ffff)
        );
    }
}
