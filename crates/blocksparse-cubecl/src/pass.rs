//! A pass over a layout, as the tiers get it.

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
    /// What the launches compute.
    pub layout: &'a BlockLayout,
    /// How positions are listed; `None`: as they come.
    pub residue: Option<Residue>,
}

/// What both passes are of; the forward pass by itself.
pub struct Pass<'a> {
    pub client: &'a Client,
    /// The call's own layout, of which the parts are.
    pub layout: &'a BlockLayout,
    pub request: &'a Request,
    /// q, k and v.
    pub inputs: [&'a TensorView; 3],
    /// As the forward pass leaves them.
    pub outputs: Outputs<'a>,
    pub options: &'a ScoreOptions,
    /// The slopes on the device.
    pub slopes: Option<Handle>,
    pub indexing: Indexing,
}

impl<'a> Pass<'a> {
    /// A pass that reads q, k, v and the tensors `beside` them.
    ///
    /// # Errors
    /// As [`Indexing::new`], and if slopes would be uploaded inside a recording.
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

    /// Where each row's largest score goes, if it is asked for.
    pub fn max_scores<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        let asked = self.request.max_scores;
        optional(self.outputs.max_scores.filter(|_| asked), self.rows())
    }

    /// The inputs, as errors name them.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 3] {
        named(self.inputs)
    }

    /// Rows of queries.
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

/// What one mainloop of the backward pass reads and writes.
pub struct Operands<'a> {
    /// Heads that it is launched for.
    pub heads: usize,
    /// Of the tile's own rows: q and dO, or k and v.
    pub a: [&'a TensorView; 2],
    /// Of the gathered rows: k and v, or q and dO.
    pub b: [&'a TensorView; 2],
    /// dQ, or dK and dV.
    pub out: &'a Handle,
    /// Elements of `out`,
    pub elements: usize,
    /// and those before dV.
    pub second: usize,
}

impl<'a> Operands<'a> {
    /// The inputs, as errors name them.
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
    /// The inputs, as errors name them.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 4] {
        let [q, k, v] = self.pass.named();
        [q, k, v, ("grad_out", self.grads.out)]
    }

    /// What a mainloop reads and writes.
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
