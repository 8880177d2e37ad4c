//! Grid of images in a PNG.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::format::{CHANNELS, Pictures};

/// Pixels between images.
const GAP: usize = 4;

/// Longest side of a grid, in pixels.
pub const MOST_PIXELS: usize = 1 << 14;

/// Returns the width of `count` images side by side, in pixels.
pub fn side(pictures: Pictures, count: usize, zoom: usize) -> usize {
    let cell = pictures.side.saturating_mul(zoom).saturating_add(GAP);
    count.saturating_mul(cell).saturating_add(GAP)
}

/// Writes images, whose bytes have the channels last, row by row; each pixel becomes a square of `zoom` pixels.
pub fn save(
    path: &Path,
    pictures: Pictures,
    shown: &[Vec<u8>],
    columns: usize,
    zoom: usize,
) -> Result<()> {
    let cell = pictures.side * zoom;
    let rows = shown.len().div_ceil(columns);
    let [width, height] = [columns, rows].map(|count| side(pictures, count, zoom));
    let mut buffer = vec![255; CHANNELS * width * height];
    for (index, picture) in shown.iter().enumerate() {
        let (left, top) = (index % columns, index / columns);
        for y in 0..cell {
            for x in 0..cell {
                let from = CHANNELS * (y / zoom * pictures.side + x / zoom);
                let [to_x, to_y] = [(left, x), (top, y)].map(|(at, i)| GAP + at * (cell + GAP) + i);
                let to = CHANNELS * (to_y * width + to_x);
                buffer[to..to + CHANNELS].copy_from_slice(&picture[from..from + CHANNELS]);
            }
        }
    }
    draw(path, (width as u32, height as u32), buffer)
        .map_err(|error| anyhow!("cannot write {}: {error}", path.display()))
}

fn draw(path: &Path, size: (u32, u32), buffer: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
    let area = BitMapBackend::new(path, size).into_drawing_area();
    let bitmap: BitMapElement<_> = BitMapElement::with_owned_buffer((0, 0), size, buffer)
        .ok_or("the buffer has another size")?;
    area.draw(&bitmap)?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_a_png_of_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grid.png");
        let pictures = Pictures {
            side: 2,
            classes: 1,
            halved: false,
        };
        save(&path, pictures, &vec![vec![7; 12]; 3], 2, 5).unwrap();
        let png = std::fs::read(&path).unwrap();
        assert!(png.starts_with(b"\x89PNG"));
        // Width and height follow the signature and the first chunk's header: two images of 10 pixels and three gaps.
        assert_eq!(png[16..24], [0, 0, 0, 32, 0, 0, 0, 32]);
    }
}
