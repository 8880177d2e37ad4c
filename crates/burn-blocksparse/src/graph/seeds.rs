//! Dropout seeds inside recordings.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use blocksparse::{Seed, SeedTable};

use super::recording;
use crate::base::prelude::*;
use crate::graph::ops::StaticInputOps;

/// A dropout seed that a recorded computation reads from the device, so that each replay has another mask.
///
/// A seed that is a number would be frozen in a recording and is refused there. This seed is a slot: pass [`seed`](Self::seed) to
/// [`Dropout`](crate::Dropout), `ElementDropout` or a model's training step, and set it with [`write`](Self::write) before each run of
/// [`CapturedGraph`](super::CapturedGraph). Masks are bit-identical to those of the number that is written. Seeds derived by [`Seed::derive`] change with it.
///
/// It cannot leave its thread, like [`StaticInput`](super::StaticInput). When it is dropped, its words on the device are released and new calls refuse its
/// slots. Backward passes of earlier calls use its last number.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_blocksparse::graph::DeviceSeed;
/// use burn_blocksparse::{Dropout, Pattern, Seed, SparseAttentionCall};
///
/// let device = Device::flex();
/// let seed = DeviceSeed::new(7, &device)?;
/// let layout = Pattern::causal().layout(1, 16, 8)?;
/// let dropped = |seed: Seed| {
///     let x = Tensor::<4>::ones([1, 1, 16, 4], &device);
///     let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout);
///     call.dropout(Dropout::new(0.5, seed)).run().map(|output| output.out)
/// };
/// seed.write(9)?;
/// let (place, number) = (dropped(seed.seed())?, dropped(9.into())?);
/// assert_eq!(place.into_data(), number.into_data());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DeviceSeed(Rc<Words>);

#[derive(Debug)]
struct Words {
    table: SeedTable,
    device: Device,
    on_device: RefCell<Tensor<1, Int>>,
    /// Number of slots that are on the device.
    uploaded: Cell<usize>,
}

thread_local! {
    /// Seeds of this thread by table number.
    static KNOWN: RefCell<HashMap<u32, Rc<Words>>> = RefCell::default();
}

impl DeviceSeed {
    /// Creates a seed on the device.
    ///
    /// # Errors
    /// [`OpError`] if the device is not served, or if this thread records.
    pub fn new(seed: u64, device: &Device) -> Result<Self, OpError> {
        served(device)?;
        recording::ensure_not_capturing("a seed")?;
        let device = device.clone().without_autodiff();
        let table = SeedTable::new(seed);
        let on_device = Tensor::from_data(words_of(&table), (&device, DType::I32));
        let words = Rc::new(Words {
            table,
            device,
            on_device: RefCell::new(on_device),
            uploaded: Cell::new(0),
        });
        words.upload(None)?;
        KNOWN.with_borrow_mut(|known| known.insert(words.table.number(), words.clone()));
        Ok(Self(words))
    }

    /// Returns the seed to pass to calls.
    pub fn seed(&self) -> Seed {
        self.0.table.seed()
    }

    /// Sets the number, after all work that this thread has enqueued.
    ///
    /// # Errors
    /// [`OpError`] if this thread records, or if work enqueued before failed.
    pub fn write(&self, seed: u64) -> Result<(), OpError> {
        recording::ensure_not_capturing("a seed")?;
        self.0.upload(Some(seed))
    }
}

impl Drop for DeviceSeed {
    fn drop(&mut self) {
        // `None` while the thread exits.
        let _ = KNOWN.try_with(|known| known.borrow_mut().remove(&self.0.table.number()));
    }
}

impl Words {
    /// Uploads the words. Fusion runs operations later and in its own order, and no operation declares that it reads the words. So earlier work must be flushed
    /// before the upload, and the upload before later work.
    fn upload(&self, seed: Option<u64>) -> Result<(), OpError> {
        let device = self.device.as_dispatch();
        Dispatch::flush(device).map_err(OpError::read)?;
        if let Some(seed) = seed {
            self.table.set(seed);
        }
        self.uploaded.set(self.table.places());
        let mut words = self.on_device.borrow_mut();
        *words = Tensor::from_dispatch(<Dispatch as StaticInputOps>::overwrite_seeds(
            words.clone().into_dispatch(),
            words_of(&self.table),
            self.table.number(),
        ));
        drop(words);
        Dispatch::flush(device).map_err(OpError::read)
    }
}

fn words_of(table: &SeedTable) -> TensorData {
    let words = table.words();
    let length = words.len();
    TensorData::new(words, [length])
}

/// Uploads a [`DeviceSeed`]'s slot and all seeds derived so far, which the first call with each would otherwise do. Layers that know the seeds of
/// their calls use it, so that Burn's fusion is interrupted once, before their first operation. Does nothing for a number.
///
/// # Errors
/// [`OpError`] if the seed belongs to another thread or device, or if it is not on the device and this thread records.
pub fn prepare_seed(seed: Seed, device: &Device) -> Result<(), OpError> {
    match seed {
        Seed::Value(_) => Ok(()),
        Seed::Place(_) => check(seed, device),
    }
}

/// Checks that a call on `device` may use this seed now. Uploads a slot if necessary.
pub fn check(seed: Seed, device: &Device) -> Result<(), OpError> {
    let place = match seed {
        Seed::Value(_) if recording::is_recording() => {
            return Err(OpError::Frozen {
                what: "dropout's seed",
                instead: "take it from a DeviceSeed",
            });
        }
        Seed::Value(_) => return Ok(()),
        Seed::Place(place) => place,
    };
    let known = KNOWN.with_borrow(|known| known.get(&place.table()).cloned());
    let Some(words) = known else {
        let expected = "of a DeviceSeed that this thread has";
        return Err(OpError::argument("dropout's seed", expected, "another"));
    };
    let device = device.clone().without_autodiff();
    OpError::expect_same("dropout's seed", &device, "that of the call", &words.device)?;
    if place.slot() as usize >= words.uploaded.get() {
        recording::ensure_not_capturing("a seed that is derived of another")?;
        words.upload(None)?;
    }
    Ok(())
}
