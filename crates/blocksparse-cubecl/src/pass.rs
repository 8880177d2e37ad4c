//! A pass over a layout, as passed to the tiers.

use std::ops::Deref;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::args::{Indexing, ScoreOptions, optional};
use super::call::{Gradients, OutputGrads, Outputs, Request, TensorView};
use super::error::KernelError;
use blocksparse::plan::Mainloop;
use blocksparse::{BlockLayout, Residue};

/// A part of a layout, with launches of its own.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Layout of the part's launches.
    pub layout: &'a BlockLayout,
    /// Order of positions, by residue class. `None` means consecutive positions.
    pub residue: Option<Residue>,
}

/// Operands of the forward pass, which the backward pass shares.
pub struct Pass<'a> {
    pub client: &'a Client,
    /// The call's whole layout.
    pub layout: &'a BlockLayout,
    pub request: &'a Request,
    /// q, k and v.
    pub inputs: [&'a TensorView; 3],
    /// Outputs of the forward pass.
    pub outputs: Outputs<'a>,
    pub options: &'a ScoreOptions,
    /// The slopes on the device.
    pub slopes: Option<Handle>,
    pub indexing: Indexing,
}

impl<'a> Pass<'a> {
    /// Checks the tensors and returns a pass that reads q, k, v and the tensors in `beside`.
    ///
    /// # Errors
    /// Those of [`Indexing::new`], and if slopes would be uploaded inside a recording.
    pub fn new(
        client: &'a Client,
        layout: &'a BlockLayout,
        request: &'a Request,
        inputs: [&'a TensorView; 3],
        outputs: Outputs<'a>,
        options: &'a ScoreOptions,
        beside: &[(&'static str, &'a TensorView)],
    ) -> Result<Self, KernelError> {
        let read = [&named(inputs), beside].concat();
        Ok(Self {
            client,
            layout,
            request,
            inputs,
            outputs,
            options,
            slopes: options.device_slopes(client, layout, request.accumulator())?,
            indexing: Indexing::new(client, request, layout, &read, options)?,
        })
    }

    /// Returns the buffer of each row's largest score, if the request asks for it.
    pub fn max_scores<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let asked = self.request.max_scores;
        optional(self.outputs.max_scores.filter(|_| asked), self.rows())
    }

    /// Inputs with their names in errors.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 3] {
        named(self.inputs)
    }

    /// Number of query rows over batch entries and heads.
    pub fn rows(&self) -> usize {
        self.request.batch * self.layout.heads() * self.layout.seq_q()
    }
}

fn named([q, k, v]: [&TensorView; 3]) -> [(&'static str, &TensorView); 3] {
    [("q", q), ("k", k), ("v", v)]
}

/// The backward pass.
pub struct BackwardPass<'a> {
    pub pass: Pass<'a>,
    pub grads: OutputGrads<'a>,
    pub gradients: &'a Gradients,
}

impl<'a> Deref for BackwardPass<'a> {
    type Target = Pass<'a>;

    fn deref(&self) -> &Pass<'a> {
        &self.pass
    }
}

/// Operands of one mainloop of the backward pass.
pub struct Operands<'a> {
    /// Number of heads of the launch.
    pub heads: usize,
    /// Tensors of the tile's own rows: q and dO, or k and v.
    pub a: [&'a TensorView; 2],
    /// Tensors of the gathered rows: k and v, or q and dO.
    pub b: [&'a TensorView; 2],
    /// dQ, or dK and dV.
    pub out: &'a Handle,
    /// Number of elements of `out`.
    pub elements: usize,
    /// Element of `out` at which dV begins.
    pub second: usize,
}

impl<'a> Operands<'a> {
    /// Inputs with their names in errors.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 4] {
        let ([a1, a2], [b1, b2]) = (self.a, self.b);
        [
            ("q or k", a1),
            ("v or grad_out", a2),
            ("k or q", b1),
            ("grad_out or v", b2),
        ]
    }
}

impl<'a> BackwardPass<'a> {
    /// Inputs with their names in errors.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 4] {
        let [q, k, v] = self.pass.named();
        [q, k, v, ("grad_out", self.grads.out)]
    }

    /// Returns the operands of a mainloop.
    pub fn operands(&self, mainloop: Mainloop) -> Operands<'a> {
        let [q, k, v] = self.inputs;
        let grad_out = self.grads.out;
        let (batch, kv_heads) = (self.request.batch, self.request.kv_heads);
        let (head_dim, value_dim) = (self.request.head_dim, self.request.value_dim);
        match mainloop {
            Mainloop::Rows => Operands {
                heads: self.layout.heads(),
                a: [q, grad_out],
                b: [k, v],
                out: &self.gradients.q,
                elements: self.rows() * head_dim,
                second: 0,
            },
            Mainloop::Columns => {
                let v_elements = batch * kv_heads * self.layout.seq_kv() * value_dim;
                Operands {
                    heads: kv_heads,
                    a: [k, v],
                    b: [q, grad_out],
                    out: &self.gradients.kv,
                    elements: self.gradients.v_offset + v_elements,
                    second: self.gradients.v_offset,
                }
            }
        }
    }
}
