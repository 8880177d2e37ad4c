//! Seeds of dropout inside recordings.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use blocksparse::{Seed, SeedTable};

use super::recording;
use crate::base::prelude::*;
use crate::graph::ops::StaticInputOps;

/// A seed of dropout that a recorded computation reads from the device, so that each replay drops something else.
///
/// A seed that is a number is frozen in a recording, and refused there. This one is a place: [`seed`](Self::seed) goes into
/// [`Dropout`](crate::Dropout) or `ElementDropout`, or into a model's training step, and [`write`](Self::write) sets it before each run of
/// [`CapturedGraph`](super::CapturedGraph). Masks are those of the number that is written, bit for bit. What is made of it by [`Seed::derive`] follows.
///
/// It stays on its thread, like [`StaticInput`](super::StaticInput). Once it is dropped, so are its words on the device, new calls refuse its places, and the backward passes
/// of calls before have the number that it was last.
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
    /// Places that are on the device.
    uploaded: Cell<usize>,
}

thread_local! {
    /// By the numbers of their tables.
    static KNOWN: RefCell<HashMap<u32, Rc<Words>>> = RefCell::default();
}

impl DeviceSeed {
    /// With a seed, on the device.
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

    /// The seed for calls.
    pub fn seed(&self) -> Seed {
        self.0.table.seed()
    }

    /// Sets the number, after all that this thread has enqueued.
    ///
    /// # Errors
    /// [`OpError`] if this thread records, or if what was enqueued before failed.
    pub fn write(&self, seed: u64) -> Result<(), OpError> {
        recording::ensure_not_capturing("a seed")?;
        self.0.upload(Some(seed))
    }
}

impl Drop for DeviceSeed {
    fn drop(&mut self) {
        // None while the thread ends.
        let _ = KNOWN.try_with(|known| known.borrow_mut().remove(&self.0.table.number()));
    }
}

impl Words {
    /// Fusion runs operations later and in an order of its own, and no operation says that it reads the words: what was enqueued before must run before, and what
    /// follows after.
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

/// Puts a [`DeviceSeed`]'s place, and all that were derived of it before, on the device, where the first call with each would: for layers that know which seeds
/// their calls will have, so that Burn's fusion is interrupted once and before their first operation. Does nothing for a number.
///
/// # Errors
/// [`OpError`] if the seed is of another thread or device, or if it is not there and this thread records.
pub fn prepare_seed(seed: Seed, device: &Device) -> Result<(), OpError> {
    match seed {
        Seed::Value(_) => Ok(()),
        Seed::Place(_) => check(seed, device),
    }
}

/// That a call on `device` may have this seed now; of a place it is then on the device.
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
