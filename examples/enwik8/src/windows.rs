//! Windows: how bytes are cut, and what a model reads of them.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::images::format::Pictures;

/// Window of `context` bytes. Predictions from `first` on are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Offset of the window.
    pub start: usize,
    /// First prediction that no earlier window makes.
    pub first: usize,
}

/// Where windows may begin, and their first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Text: windows begin anywhere; each byte is predicted from those before it.
    Text { context: usize },
    /// Images: windows are records, whose first byte, the class, becomes a start token.
    Pictures(Pictures),
}

impl From<usize> for Cut {
    fn from(context: usize) -> Self {
        Cut::Text { context }
    }
}

impl Cut {
    /// Returns the number of predicted bytes of a window.
    pub fn context(self) -> usize {
        match self {
            Cut::Text { context } => context,
            Cut::Pictures(pictures) => pictures.bytes(),
        }
    }

    /// Returns how many of `bytes` an epoch predicts, apart from a remainder shorter than a window.
    pub fn predictions(self, bytes: usize) -> usize {
        match self {
            Cut::Text { .. } => bytes,
            Cut::Pictures(pictures) => bytes / pictures.record() * pictures.bytes(),
        }
    }

    /// Returns the windows of an epoch in random order; those of text begin at a random phase.
    pub fn shuffled(self, bytes: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let mut starts: Vec<usize> = match self {
            Cut::Text { context } => {
                let room = bytes - 1 - context;
                let phase = rng.random_range(0..=room.min(context - 1) as u64) as usize;
                (phase..=room).step_by(context).collect()
            }
            Cut::Pictures(pictures) => (0..bytes).step_by(pictures.record()).collect(),
        };
        starts.shuffle(rng);
        starts
    }

    /// Returns windows that predict everything once; for text see [`sliding_windows`].
    pub fn all(self, bytes: usize, min_context: usize) -> Vec<Window> {
        match self {
            Cut::Text { context } => sliding_windows(bytes, context, min_context),
            Cut::Pictures(pictures) => (0..bytes).step_by(pictures.record()).map(whole).collect(),
        }
    }

    /// Returns `count` whole windows spread evenly over `bytes`, or all if there are fewer.
    pub fn spread(self, bytes: usize, count: usize) -> Vec<Window> {
        let (last, unit, count) = match self {
            Cut::Text { context } if count.saturating_mul(context) >= bytes - 1 => {
                return sliding_windows(bytes, context, 0);
            }
            Cut::Text { context } => (bytes - 1 - context, 1, count),
            Cut::Pictures(pictures) => {
                let all = bytes / pictures.record();
                (all.saturating_sub(1), pictures.record(), count.min(all))
            }
        };
        (0..count)
            .map(|index| whole(index * last / (count - 1).max(1) * unit))
            .collect()
    }

    /// Returns the tokens and the targets of windows, both `[windows, context]`.
    pub fn data(self, bytes: &[u8], starts: &[usize]) -> [TensorData; 2] {
        let context = self.context();
        [0, 1].map(|offset| {
            let mut values = Vec::with_capacity(starts.len() * context);
            for start in starts {
                let from = start + offset;
                let first = values.len();
                values.extend(
                    bytes[from..from + context]
                        .iter()
                        .map(|&byte| i32::from(byte)),
                );
                if let (Cut::Pictures(_), 0) = (self, offset) {
                    values[first] = Pictures::start_token(bytes[*start]) as i32;
                }
            }
            TensorData::new(values, [starts.len(), context])
        })
    }

    /// [`Self::data`] on a device.
    pub fn tensors(self, bytes: &[u8], starts: &[usize], device: &Device) -> [Tensor<2, Int>; 2] {
        self.data(bytes, starts)
            .map(|data| Tensor::from_data(data, device))
    }
}

fn whole(start: usize) -> Window {
    Window { start, first: 0 }
}

/// Returns windows that predict each of `bytes` but the first exactly once; after the first window each prediction has more than `min_context` bytes before
/// it. (The paper's evaluation, §7.)
///
/// `bytes` must exceed `context`, and `context` must exceed `min_context`.
fn sliding_windows(bytes: usize, context: usize, min_context: usize) -> Vec<Window> {
    let last = bytes - 1 - context;
    let mut windows = vec![whole(0)];
    let mut predicted = context;
    while predicted < bytes - 1 {
        let start = (predicted - min_context).min(last);
        windows.push(Window {
            start,
            first: predicted - start,
        });
        predicted = start + context;
    }
    windows
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn every_byte_is_predicted_once_with_enough_context() {
        for (bytes, context, min_context) in [
            (100, 10, 0),
            (100, 10, 9),
            (101, 10, 3),
            (11, 10, 5),
            (12, 10, 9),
            (1_000, 64, 48),
        ] {
            let mut times = vec![0; bytes];
            let windows = Cut::from(context).all(bytes, min_context);
            for (index, window) in windows.iter().enumerate() {
                for prediction in window.first..context {
                    let byte = window.start + prediction + 1;
                    times[byte] += 1;
                    assert!(index == 0 || byte - window.start > min_context);
                }
            }
            assert_eq!(times[0], 0);
            assert!(
                times[1..].iter().all(|&count| count == 1),
                "{bytes} {context} {min_context}"
            );
        }
    }

    #[test]
    fn windows_are_spread_from_end_to_end() {
        let cut = Cut::from(100);
        let windows = cut.spread(1_001, 4);
        let starts: Vec<_> = windows.iter().map(|window| window.start).collect();
        assert_eq!(starts, [0, 300, 600, 900]);
        assert_eq!(cut.spread(301, 50), cut.all(301, 0));
        assert_eq!(cut.spread(301, usize::MAX), cut.all(301, 0));
        assert_eq!(cut.spread(1_001, 1).len(), 1);
    }

    /// No window has parts of two images, and every byte of every image is predicted, its first one from its class.
    #[test]
    fn each_picture_is_a_window() {
        let pictures = Pictures {
            side: 2,
            classes: 3,
            halved: false,
        };
        let cut = Cut::Pictures(pictures);
        let bytes: Vec<u8> = (0..5 * 13)
            .map(|at| if at % 13 == 0 { at / 13 % 3 } else { at })
            .collect();
        assert_eq!((cut.context(), cut.predictions(bytes.len())), (12, 60));
        let mut order = cut.shuffled(bytes.len(), &mut ChaCha8Rng::seed_from_u64(1));
        assert_ne!(order, [0, 13, 26, 39, 52]);
        order.sort_unstable();
        assert_eq!(order, [0, 13, 26, 39, 52]);
        let starts: Vec<usize> = cut
            .all(bytes.len(), 0)
            .iter()
            .map(|window| window.start)
            .collect();
        assert_eq!(starts, order);
        let spread = |count| {
            cut.spread(bytes.len(), count)
                .iter()
                .map(|window| window.start / 13)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            [spread(1), spread(3), spread(9)],
            [vec![0], vec![0, 2, 4], vec![0, 1, 2, 3, 4]]
        );

        let [tokens, targets] = cut
            .data(&bytes, &[13, 52])
            .map(|data| data.try_to_vec::<i32>().unwrap());
        let follows = |first: i32, picture: i32| -> Vec<i32> {
            std::iter::once(first)
                .chain(13 * picture + 1..13 * picture + 12)
                .collect()
        };
        assert_eq!(tokens, [follows(257, 1), follows(257, 4)].concat());
        let all: Vec<i32> = (14..26).chain(53..65).collect();
        assert_eq!(targets, all);
    }
}
