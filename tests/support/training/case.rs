//! An operation as a case: its tensors, its call, and the f64 loops that judge it. The common properties of operations are checked here.

use burn::tensor::Shape;
use burn_blocksparse::OpPlan;

use crate::gate;
use crate::prelude::*;

/// A tensor of a case.
#[derive(Clone)]
struct Given {
    name: String,
    shape: Vec<usize>,
    /// Values of an input; of a result the gradient with respect to it, or None if it is not in the loss.
    values: Option<Vec<f64>>,
    /// Index into a call's dtypes.
    dtype: usize,
}

/// Memory order of tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Laid {
    /// Contiguous.
    Plain,
    /// With the first and the last dimension swapped, after steps that gradient checkpointing recomputes; also gradients with respect to results.
    Turned,
}

/// Results of a case, and the gradients with respect to its inputs, if any.
pub type Found = Vec<Option<TensorData>>;

pub type Call<'a> = dyn Fn(&mut Tensors) -> Vec<Made> + 'a;

pub type Judge<'a> = dyn Fn(&[Vec<f64>], &[Vec<f64>]) -> Vec<Vec<f64>> + 'a;

/// A call with its tensors in f64.
pub struct Case<'a> {
    what: String,
    inputs: Vec<Given>,
    results: Vec<Given>,
    call: Box<Call<'a>>,
    judge: Box<Judge<'a>>,
}

/// Tensors of a call, in the order of the inputs.
pub struct Tensors {
    rest: std::vec::IntoIter<(Tensor<1>, Vec<usize>, Laid)>,
    pub dtypes: Vec<DType>,
}

impl Tensors {
    pub fn take<const D: usize>(&mut self) -> Tensor<D> {
        let (flat, shape, laid) = self.rest.next().expect("an input that is left");
        let shape: [usize; D] = shape.try_into().expect("a tensor of that rank");
        if laid == Laid::Plain {
            return shaped(flat, shape);
        }
        let mut stored = shape;
        stored.swap(0, D - 1);
        shaped(flat * 2.0 * 0.5, stored).swap_dims(0, D - 1)
    }
}

/// Reshapes. Burn's `reshape` takes a 0 as the existing length, so empty shapes need a detour.
fn shaped<const D: usize>(flat: Tensor<1>, shape: [usize; D]) -> Tensor<D> {
    match shape.iter().position(|length| *length == 0) {
        None => flat.reshape(shape),
        Some(empty) => {
            let mut column = [1; D];
            column[0] = 0;
            flat.reshape(column)
                .swap_dims(0, empty)
                .expand(Shape::new(shape))
        }
    }
}

/// A result of any rank.
pub struct Made {
    shape: Vec<usize>,
    flat: Tensor<1>,
    turned: Tensor<1>,
}

impl<const D: usize> From<Tensor<D>> for Made {
    fn from(x: Tensor<D>) -> Self {
        Self {
            shape: x.dims().to_vec(),
            flat: x.clone().flatten(0, D - 1),
            turned: x.swap_dims(0, D - 1).flatten(0, D - 1),
        }
    }
}

/// Returns the lengths of the first, of all middle and of the last dimensions.
fn three(shape: &[usize]) -> [usize; 3] {
    match shape {
        [first, middle @ .., last] => [*first, middle.iter().product(), *last],
        _ => [1, 1, shape.iter().product()],
    }
}

/// Values of a tensor, or a seed for them; a result without values is not in the loss.
pub trait Values {
    fn of(self, count: usize) -> Option<Vec<f64>>;
}

impl Values for u64 {
    fn of(self, count: usize) -> Option<Vec<f64>> {
        Some(numbers(self, count))
    }
}

impl Values for Vec<f64> {
    fn of(self, _: usize) -> Option<Vec<f64>> {
        Some(self)
    }
}

impl<V: Values> Values for Option<V> {
    fn of(self, count: usize) -> Option<Vec<f64>> {
        self?.of(count)
    }
}

impl Given {
    fn rounded(&self, dtypes: &[DType]) -> Vec<f64> {
        let zeros = || vec![0.0; self.shape.iter().product()];
        let mut values = self.values.clone().unwrap_or_else(zeros);
        round_to(&mut values, dtypes[self.dtype]);
        values
    }

    fn flat(&self, device: &Device, dtypes: &[DType], laid: Laid) -> Tensor<1> {
        let mut values = self.rounded(dtypes);
        if laid == Laid::Turned {
            let [a, m, b] = three(&self.shape);
            let at = |at: usize| (at % a * m + at / a % m) * b + at / a / m;
            values = (0..values.len()).map(|i| values[at(i)]).collect();
        }
        tensor(&values, [values.len()], device, dtypes[self.dtype])
    }

    /// Reads a gradient with respect to this input, in the order of the contiguous tensor.
    fn back(&self, grad: Tensor<1>, laid: Laid) -> TensorData {
        let [a, m, b] = three(&self.shape);
        match laid {
            Laid::Plain => read(grad),
            Laid::Turned => read(shaped(grad, [b, m, a]).swap_dims(0, 2).flatten::<1>(0, 2)),
        }
    }
}

impl<'a> Case<'a> {
    /// Makes a call without tensors. Its judge maps inputs and gradients with respect to results to results and gradients with respect to inputs.
    pub fn new(
        what: impl Into<String>,
        call: impl Fn(&mut Tensors) -> Vec<Made> + 'a,
        judge: impl Fn(&[Vec<f64>], &[Vec<f64>]) -> Vec<Vec<f64>> + 'a,
    ) -> Self {
        Self {
            what: what.into(),
            inputs: Vec::new(),
            results: Vec::new(),
            call: Box::new(call),
            judge: Box::new(judge),
        }
    }

    /// Makes a call that is only compared with another one.
    pub fn unjudged(
        what: impl Into<String>,
        call: impl Fn(&mut Tensors) -> Vec<Made> + 'a,
    ) -> Self {
        Self::new(what, call, |_, _| panic!("a case without a judge"))
    }

    fn given(name: &str, dtype: usize, shape: &[usize], values: impl Values) -> Given {
        Given {
            name: name.to_owned(),
            shape: shape.to_vec(),
            values: values.of(shape.iter().product()),
            dtype,
        }
    }

    pub fn input(mut self, name: &str, dtype: usize, shape: &[usize], values: impl Values) -> Self {
        self.inputs.push(Self::given(name, dtype, shape, values));
        self
    }

    /// Adds an input if `is_there`.
    pub fn input_if(
        self,
        is_there: bool,
        name: &str,
        dtype: usize,
        shape: &[usize],
        values: impl Values,
    ) -> Self {
        match is_there {
            true => self.input(name, dtype, shape, values),
            false => self,
        }
    }

    /// Adds a result, and the gradient with respect to it if it is in the loss.
    pub fn result(
        mut self,
        name: &str,
        dtype: usize,
        shape: &[usize],
        gradient: impl Values,
    ) -> Self {
        self.results.push(Self::given(name, dtype, shape, gradient));
        self
    }

    /// Rounds the values to another dtype.
    pub fn rounded(mut self, dtype: DType) -> Self {
        let all = self.inputs.iter_mut().chain(&mut self.results);
        all.filter_map(|given| given.values.as_mut())
            .for_each(|values| round_to(values, dtype));
        self
    }

    fn all(&self) -> Vec<bool> {
        vec![true; self.inputs.len()]
    }

    /// Makes the inputs; those that are `tracked` require gradients.
    fn leaves(
        &self,
        device: &Device,
        dtypes: &[DType],
        tracked: &[bool],
        laid: Laid,
    ) -> Vec<Tensor<1>> {
        let leaf =
            |(x, tracked): (&Given, &bool)| x.flat(device, dtypes, laid).set_require_grad(*tracked);
        self.inputs.iter().zip(tracked).map(leaf).collect()
    }

    fn call(&self, leaves: Vec<Tensor<1>>, dtypes: &[DType], laid: Laid) -> Vec<Made> {
        let shapes = self.inputs.iter().map(|x| x.shape.clone());
        let inputs: Vec<_> = (leaves.into_iter().zip(shapes))
            .map(|(leaf, shape)| (leaf, shape, laid))
            .collect();
        let mut tensors = Tensors {
            rest: inputs.into_iter(),
            dtypes: dtypes.to_vec(),
        };
        let made = (self.call)(&mut tensors);
        assert_eq!(tensors.rest.len(), 0, "{}: inputs are left", self.what);
        assert_eq!(made.len(), self.results.len(), "{}", self.what);
        for (made, given) in made.iter().zip(&self.results) {
            let (what, name) = (&self.what, &given.name);
            assert_eq!(made.shape, given.shape, "{what}: {name}");
            assert_eq!(made.flat.dtype(), dtypes[given.dtype], "{what}: {name}");
        }
        made
    }

    /// Returns the results, and the gradients with respect to tracked inputs.
    pub fn run(&self, device: &Device, dtypes: &[DType], tracked: &[bool], laid: Laid) -> Found {
        let leaves = self.leaves(device, dtypes, tracked, laid);
        let made = self.call(leaves.clone(), dtypes, laid);
        let mut loss: Option<Tensor<1>> = None;
        for (made, given) in made.iter().zip(&self.results) {
            if given.values.is_none() {
                continue;
            }
            let seen = match laid {
                Laid::Plain => made.flat.clone(),
                Laid::Turned => made.turned.clone(),
            };
            let sums = match seen.dtype() {
                DType::F64 => DType::F64,
                _ => DType::F32,
            };
            // Not `sum`: on WGPU its gradient overwrites the loss's if the tensor is empty.
            let part = (seen * given.flat(device, dtypes, laid))
                .sum_dim(0)
                .cast(sums);
            loss = Some(match loss {
                Some(loss) => {
                    let dtype = loss.dtype();
                    loss + part.cast(dtype)
                }
                None => part,
            });
        }
        let mut found: Found = (made.into_iter())
            .map(|made| Some(read(made.flat)))
            .collect();
        if tracked.contains(&true) {
            let grads = loss.expect("a result in the loss").backward();
            let leaves = leaves.iter().zip(&self.inputs);
            found.extend(leaves.map(|(leaf, x)| Some(x.back(leaf.grad(&grads)?, laid))));
        }
        found
    }

    /// Runs with all inputs tracked.
    pub fn run_all(&self, device: &Device, dtypes: &[DType]) -> Found {
        self.run_on(&device.clone().autodiff(), dtypes)
    }

    /// Like [`Self::run_all`], on an autodiff device.
    pub fn run_on(&self, device: &Device, dtypes: &[DType]) -> Found {
        self.run(device, dtypes, &self.all(), Laid::Plain)
    }

    /// Applies a function to the values of inputs and of gradients with respect to results, rounded to dtypes.
    pub fn numbers<R>(&self, dtypes: &[DType], of: impl Fn(&[Vec<f64>], &[Vec<f64>]) -> R) -> R {
        let all = |given: &[Given]| given.iter().map(|x| x.rounded(dtypes)).collect::<Vec<_>>();
        of(&all(&self.inputs), &all(&self.results))
    }

    pub fn judge(&self) -> &Judge<'a> {
        &self.judge
    }

    /// Returns a device's results and the expected ones, by name.
    pub fn compared(
        &self,
        device: &Device,
        dtypes: &[DType],
    ) -> Vec<(String, TensorData, Vec<f64>)> {
        let expected = self.numbers(dtypes, &self.judge);
        let got = self.run_all(device, dtypes);
        assert_eq!(got.len(), expected.len(), "{}", self.what);
        let results = self.results.iter().map(|x| (x.name.clone(), x.dtype));
        let inputs = self.inputs.iter();
        let inputs = inputs.map(|x| (format!("d{}", x.name), x.dtype));
        let names = results.chain(inputs).zip(got.into_iter().zip(expected));
        let named = names.map(|((name, dtype), (got, expected))| {
            let what = format!("{}, {device:?}, {dtypes:?}: {name}", self.what);
            let got = got.unwrap_or_else(|| panic!("{what}: there is none"));
            assert_eq!(got.dtype(), dtypes[dtype], "{what}");
            (what, got, expected)
        });
        named.collect()
    }

    /// Compares all results and gradients, with a tolerance for each.
    pub fn check(&self, device: &Device, dtypes: &[DType], within: impl Fn(usize) -> f64) {
        let compared = self.compared(device, dtypes).into_iter().enumerate();
        for (index, (what, got, expected)) in compared {
            assert_close(&what, got, &expected, within(index));
        }
    }

    /// Compares in one dtype.
    pub fn check_in(&self, device: &Device, dtype: DType, tolerance: f64) {
        self.check(device, &[dtype; 4], |_| tolerance);
    }

    /// Compares the results of a call without tracked inputs.
    pub fn check_results(&self, device: &Device, dtype: DType, tolerance: f64) {
        let (dtypes, none) = ([dtype; 4], vec![false; self.inputs.len()]);
        let expected = self.numbers(&dtypes, &self.judge);
        let got = self.run(device, &dtypes, &none, Laid::Plain);
        for ((got, expected), given) in got.into_iter().zip(expected).zip(&self.results) {
            let what = format!("{}, {device:?}, {dtype:?}: {}", self.what, given.name);
            assert_close(&what, got.unwrap(), &expected, tolerance);
        }
    }

    /// Two runs give equal bits, whatever the strides of tensors and gradients, and with gradient checkpointing. Other strides may differ by a
    /// tolerance.
    pub fn gives_the_same_bits(&self, devices: &[Device], strides: f64) {
        for plain in devices {
            let first = self.run_all(plain, &[DType::F32; 4]);
            let again = self.run_all(plain, &[DType::F32; 4]);
            let twice = format!("{}, {plain:?}, twice", self.what);
            assert_found(&twice, &again, &first, 0.0);
            let turned = tracked(plain)
                .map(|device| self.run(&device, &[DType::F32; 4], &self.all(), Laid::Turned));
            let what = format!("{}, {plain:?}, of other strides", self.what);
            assert_found(&what, &turned[0], &first, strides);
            let what = format!("{what}, checkpointing");
            assert_found(&what, &turned[1], &turned[0], 0.0);
        }
    }

    /// Frozen inputs get no gradient, and change no other beyond `tolerance`. Without tracked inputs nothing is differentiated, and inputs that are
    /// used again are unchanged.
    pub fn has_constants(&self, devices: &[Device], tolerance: f64) {
        let f32s = &[DType::F32; 4];
        for plain in devices {
            let device = plain.clone().autodiff();
            let all = self.run_all(plain, f32s);
            for bits in 1..(1_usize << self.inputs.len()) - 1 {
                let tracked = (0..self.inputs.len()).map(|bit| bits >> bit & 1 != 0);
                let tracked: Vec<bool> = tracked.collect();
                let mut expected = all.clone();
                let by_inputs = expected[self.results.len()..].iter_mut();
                for (by, tracked) in by_inputs.zip(&tracked) {
                    *by = by.take().filter(|_| *tracked);
                }
                let some = self.run(&device, f32s, &tracked, Laid::Plain);
                let what = format!("{}, {plain:?}, {tracked:?}", self.what);
                assert_found(&what, &some, &expected, tolerance);
            }
            let none = vec![false; self.inputs.len()];
            for device in [plain, &device] {
                let leaves = self.leaves(device, f32s, &none, Laid::Plain);
                let before: Found = leaves.iter().map(|x| Some(read(x.clone()))).collect();
                let results = |leaves| -> Found {
                    let made = self.call(leaves, f32s, Laid::Plain).into_iter();
                    let flat = made.map(|made| made.flat).inspect(|made| {
                        assert!(!made.is_tracked());
                        assert_eq!(made.device().is_autodiff(), device.is_autodiff());
                    });
                    flat.map(|made| Some(read(made))).collect()
                };
                let once = results(leaves.clone());
                let after = leaves.iter().map(|x| Some(read(x.clone()))).collect();
                let what = format!("{}, {device:?}, untracked", self.what);
                assert_found(&format!("{what}, inputs"), &after, &before, 0.0);
                // The last use, whose results may overwrite inputs.
                assert_found(&what, &results(leaves), &once, 0.0);
            }
        }
    }
}

/// Compares products in half precision, with dtypes of x, the weights and the result: factors are rounded, sums are not, and gradients are f32 if
/// their tensors are.
pub fn check_products_in_halves<'a>(devices: &[Device], case: impl Fn() -> Case<'a>) {
    for (device, half) in halves(devices) {
        let rounding = if half == DType::BF16 { 4e-3 } else { 5e-4 };
        let case = case().rounded(half);
        let f32 = DType::F32;
        for dtypes in [[f32, f32, half], [half, f32, half], [half; 3]] {
            // The result, the gradient with respect to x, and those with respect to weights.
            let of = |index: usize| dtypes[[2, 0, 1][index.min(2)]];
            let within = |index| if of(index) == half { rounding } else { 1e-5 };
            case.check(device, &dtypes, within);
        }
    }
}

/// Returns the tolerance of products with other strides or other gradients, which other kernels may compute.
pub fn products_within(devices: &[Device]) -> f64 {
    let within = |device: &Device| product_tolerance(device, DType::F32, 1e-6);
    devices.iter().map(within).fold(0.0, f64::max)
}

/// Panics if results or their presence differ, in bits or beyond `tolerance`.
pub fn assert_found(what: &str, got: &Found, expected: &Found, tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let what = format!("{what}: result {index}");
        assert_eq!(got.is_some(), expected.is_some(), "{what}");
        let (Some(got), Some(expected)) = (got, expected) else {
            continue;
        };
        match tolerance > 0.0 {
            true => {
                assert_eq!(got.dtype(), expected.dtype(), "{what}");
                assert_close(&what, got.clone(), &to_f64(expected.clone()), tolerance);
            }
            false => assert_same_bits(&what, [("it", got.clone())], [("it", expected.clone())]),
        }
    }
}

/// Checks that a plan uses kernels exactly where there are some, and that its text says so.
pub fn assert_plan(plan: &OpPlan, device: &Device) {
    let name = format!("{device:?}");
    let kernels = ["Wgpu", "Cuda"].iter().any(|kind| name.contains(kind)) && !uses_reference();
    assert_eq!(plan.is_kernels(), kernels, "{plan}");
    let text = plan.to_string();
    gate::note_plan(&text);
    let expected = ["primitives", "units a cube"][usize::from(kernels)];
    assert!(text.contains(expected), "{text}");
}
