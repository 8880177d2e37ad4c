use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};

use crate::init;

/// Learned position embeddings of a sequence arranged as a matrix (Child et al., 2019, §5.3).
///
/// Position `i` is in row `i / width` and column `i mod width`; its embedding is the sum of its row's and its column's (`n_emb = 2`). If the width is the
/// attention's stride, a row of the matrix is a window of the pattern.
///
/// In an image whose pixels have `channels` bytes, a column is that of a pixel, `(i mod width) / channels`, and the channel `(i mod width) mod channels` has
/// its own embedding (`n_emb = 3`).
#[derive(Module, Debug)]
pub struct PositionEmbedding {
    /// Row embeddings, `[rows, d_model]`, `rows = ⌈context / width⌉`.
    pub row: Param<Tensor<2>>,
    /// Column embeddings, `[width, d_model]`, or with channels `[width / channels, d_model]`.
    pub column: Param<Tensor<2>>,
    /// Channel embeddings of images, `[channels, d_model]`.
    pub channel: Option<Param<Tensor<2>>>,
}

impl PositionEmbedding {
    pub(crate) fn new(
        context: usize,
        width: usize,
        channels: Option<usize>,
        d_model: usize,
        init_scale: f64,
        device: &Device,
    ) -> Self {
        let n_emb = 2 + usize::from(channels.is_some());
        let table = |len| init::embedding(len, d_model, n_emb, init_scale, device);
        Self {
            row: table(context.div_ceil(width)),
            column: table(width / channels.unwrap_or(1)),
            channel: channels.map(table),
        }
    }

    /// Returns what is added to each row's embedding, `[width, d_model]`.
    fn columns(&self) -> Tensor<2> {
        let column = self.column.val();
        let Some(channel) = &self.channel else {
            return column;
        };
        let [_, d_model] = column.dims();
        let pixels = column.unsqueeze_dim::<3>(1) + channel.val().unsqueeze_dim::<3>(0);
        pixels.reshape([self.width(), d_model])
    }

    /// Returns the embeddings of the positions `start..start + len`.
    ///
    /// # Shapes
    /// - output: `[1, len, d_model]`
    ///
    /// # Panics
    /// If a position's row is past the last one.
    pub fn forward(&self, start: usize, len: usize) -> Tensor<3> {
        let column = self.columns();
        let [width, d_model] = column.dims();
        let (first, last) = (start / width, (start + len).div_ceil(width));
        // Whole rows of the matrix as a broadcast sum: its backward pass is two reductions, where a lookup of every position would scatter.
        let rows = self.row.val().narrow(0, first, last - first);
        let matrix = rows.unsqueeze_dim::<3>(1) + column.unsqueeze_dim::<3>(0);
        matrix
            .reshape([1, (last - first) * width, d_model])
            .narrow(1, start - first * width, len)
    }

    /// Returns the embeddings of arbitrary positions, `[positions]`.
    ///
    /// # Shapes
    /// - output: `[positions, d_model]`
    pub(crate) fn at(&self, positions: &Tensor<1, Int>) -> Tensor<2> {
        let width = self.width() as i32;
        let rows = positions.clone().div_scalar(width);
        let columns = positions.clone() - rows.clone().mul_scalar(width);
        self.row.val().select(0, rows) + self.columns().select(0, columns)
    }

    /// Returns the number of columns of the matrix of positions.
    pub(crate) fn width(&self) -> usize {
        let [width, _] = self.column.dims();
        let channels = self.channel.as_ref().map_or(1, |channel| channel.dims()[0]);
        width * channels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_its_row_its_column_and_its_channel() {
        let device = Device::flex();
        for (context, width, channels, d_model) in [(22, 5, None, 3), (48, 12, Some(3), 2)] {
            let embedding =
                PositionEmbedding::new(context, width, channels, d_model, 0.125, &device);
            assert_eq!(embedding.width(), width);
            let channels = channels.unwrap_or(1);
            let tables = [&embedding.row, &embedding.column].into_iter();
            let tables: Vec<Vec<f32>> = tables
                .chain(&embedding.channel)
                .map(|table| table.val().into_data().try_to_vec().unwrap())
                .collect();
            for (start, len) in [(0, 1), (0, 22), (4, 1), (4, 2), (5, 5), (7, 11), (21, 1)] {
                let got = embedding.forward(start, len);
                assert_eq!(got.dims(), [1, len, d_model]);
                let got = got.into_data().try_to_vec::<f32>().unwrap();
                for (index, value) in got.iter().enumerate() {
                    let (i, dim) = (start + index / d_model, index % d_model);
                    let places = [i / width, i % width / channels, i % channels];
                    let parts = tables.iter().zip(places);
                    let expected: f32 = parts.map(|(table, at)| table[at * d_model + dim]).sum();
                    assert!((value - expected).abs() < 1e-7, "position {i}");
                }
            }
            // As a cache requests them.
            let place = Tensor::<1, Int>::from_ints([2 * width as i32 + 7], &device);
            let at = embedding.at(&place).unsqueeze::<3>().into_data();
            at.assert_eq(&embedding.forward(2 * width + 7, 1).into_data(), true);
        }
    }
}
