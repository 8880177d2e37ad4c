//! Small images that need no download: a shape in the colour of its class, anywhere on grey.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Number of images of the set.
const COUNT: usize = 2_000;

/// Returns whether a point is in a shape of radius 1 around the origin; y grows downwards.
type Shape = fn(f64, f64) -> bool;

/// Shape and colour of each class.
const CLASSES: [(Shape, [u16; 3]); 6] = [
    // Disc.
    (|x, y| x * x + y * y <= 1.0, [230, 50, 50]),
    // Square.
    (|x, y| x.abs().max(y.abs()) <= 0.85, [50, 200, 70]),
    // Triangle.
    (|x, y| y <= 0.8 && x.abs() <= 0.6 * (y + 1.0), [60, 90, 240]),
    // Cross.
    (
        |x, y| x.abs().min(y.abs()) <= 0.35 && x.abs().max(y.abs()) <= 1.0,
        [240, 210, 40],
    ),
    // Ring.
    (
        |x, y| (0.3..=1.0).contains(&(x * x + y * y)),
        [210, 60, 210],
    ),
    // Diamond.
    (|x, y| x.abs() + y.abs() <= 1.0, [40, 210, 220]),
];

/// Returns the set in CIFAR-10's format, with images of `side` by `side` pixels; always the same bytes.
pub fn file(side: usize) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    let mut file = Vec::with_capacity(COUNT * (1 + 3 * side * side));
    for index in 0..COUNT {
        // Every split has all classes.
        let class = index % CLASSES.len();
        let (shape, colour) = CLASSES[class];
        let width = side as f64;
        let radius = width * rng.random_range(0.22..0.4);
        let centre: [f64; 2] = [(); 2].map(|()| rng.random_range(radius..width - radius));
        let brightness = rng.random_range(2..=4u16);
        let grey = 20 * rng.random_range(0..=3u16);
        file.push(class as u8);
        for value in colour {
            for y in 0..side {
                for x in 0..side {
                    let at = [x, y].map(|pixel| pixel as f64 + 0.5);
                    let inside = shape((at[0] - centre[0]) / radius, (at[1] - centre[1]) / radius);
                    let byte = if inside { value * brightness / 4 } else { grey };
                    file.push(byte as u8);
                }
            }
        }
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_show_their_class() {
        let side = 16;
        let file = file(side);
        let record = 1 + 3 * side * side;
        assert_eq!(file.len(), COUNT * record);
        for (index, picture) in file.chunks(record).enumerate().take(60) {
            let (class, planes) = (usize::from(picture[0]), &picture[1..]);
            assert_eq!(class, index % CLASSES.len());
            let pixel = |at: usize| [0, 1, 2].map(|plane| planes[plane * side * side + at]);
            let shown = (1..side * side).filter(|&at| pixel(at) != pixel(0)).count();
            assert!(
                (10..side * side * 3 / 4).contains(&shown),
                "picture {index}: {shown} pixels"
            );
        }
        assert_eq!(crc32fast::hash(&file), crc32fast::hash(&super::file(side)));
    }
}
