//! Float tensors of a backend with operators, in which the reference implementations are written.

use std::ops::{Add, Div, Mul, Neg, Range, Sub};

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{FloatDType, Shape, Slice};

/// Returns the number of rows of a shape viewed as a matrix, and their width.
pub fn matrix(shape: &Shape) -> [usize; 2] {
    let width = shape[shape.num_dims() - 1];
    [shape.iter().rev().skip(1).product(), width]
}

/// A float tensor. Operators broadcast dimensions of 1.
#[derive(Clone, Debug)]
pub struct Array<B: Backend>(pub FloatTensor<B>);

macro_rules! operators {
    ($($trait:ident $name:ident $by_tensor:ident $by_number:ident;)*) => {$(
        impl<B: Backend> $trait for Array<B> {
            type Output = Self;

            fn $name(self, other: Self) -> Self {
                Self(B::$by_tensor(self.0, other.0))
            }
        }

        impl<B: Backend> $trait<&Self> for Array<B> {
            type Output = Self;

            fn $name(self, other: &Self) -> Self {
                self.$name(other.clone())
            }
        }

        impl<B: Backend> $trait<f64> for Array<B> {
            type Output = Self;

            fn $name(self, other: f64) -> Self {
                Self(B::$by_number(self.0, other.into()))
            }
        }
    )*};
}

operators! {
    Add add float_add float_add_scalar;
    Sub sub float_sub float_sub_scalar;
    Mul mul float_mul float_mul_scalar;
    Div div float_div float_div_scalar;
}

impl<B: Backend> Neg for Array<B> {
    type Output = Self;

    fn neg(self) -> Self {
        Self(B::float_neg(self.0))
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $of:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(self, $($argument: $type),*) -> Self {
            Self(B::$of(self.0, $($argument.into()),*))
        }
    )*};
}

impl<B: Backend> Array<B> {
    functions! {
        /// Computes e to the power of each element.
        exp() = float_exp;
        /// Computes the natural logarithm.
        log() = float_log;
        /// Computes the square root.
        sqrt() = float_sqrt;
        /// Computes the reciprocal.
        recip() = float_recip;
        /// Computes the error function.
        erf() = float_erf;
        /// Returns the sign: −1, 0 or 1.
        sign() = float_sign;
        /// Swaps the last two dimensions.
        transpose() = float_transpose;
        /// Clamps elements to at least a number.
        at_least(least: f64) = float_clamp_min;
        /// Clamps elements to a range.
        clamp(least: f64, most: f64) = float_clamp;
        /// Changes the shape.
        reshape(shape: impl Into<Shape>) = float_reshape;
        /// Sums over a dimension, which keeps length 1.
        sum_dim(dim: usize) = float_sum_dim;
        /// Takes the maximum over a dimension, which keeps length 1.
        max_dim(dim: usize) = float_max_dim;
        /// Sets elements to a number where a mask of the same shape is true.
        fill(mask: BoolTensor<B>, value: f64) = float_mask_fill;
        /// Selects indices of a dimension.
        select(dim: usize, indices: IntTensor<B>) = float_select;
    }

    /// Creates zeros.
    pub fn zeros(shape: impl Into<Shape>, device: &B::Device, dtype: FloatDType) -> Self {
        Self(B::float_zeros(shape.into(), device, dtype))
    }

    /// Concatenates one or more tensors along a dimension.
    pub fn cat(parts: impl IntoIterator<Item = Self>, dim: usize) -> Self {
        let mut parts: Vec<_> = parts.into_iter().map(|part| part.0).collect();
        match parts.len() {
            1 => Self(parts.remove(0)),
            _ => Self(B::float_cat(parts, dim)),
        }
    }

    /// Returns the shape.
    pub fn shape(&self) -> Shape {
        self.0.shape()
    }

    /// Returns the shape as an array of `D` dimensions.
    pub fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.shape().dims()
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> FloatDType {
        self.0.dtype().into()
    }

    /// Casts to a dtype. Does nothing if the tensor already has it.
    pub fn cast(self, dtype: FloatDType) -> Self {
        match self.dtype() == dtype {
            true => self,
            false => Self(B::float_cast(self.0, dtype)),
        }
    }

    /// Flattens to one dimension.
    pub fn flat(self) -> Self {
        let elements = self.shape().num_elements();
        self.reshape([elements])
    }

    /// Reverses a dimension.
    pub fn flip(self, dim: usize) -> Self {
        Self(B::float_flip(self.0, &[dim]))
    }

    /// Swaps two dimensions.
    pub fn swap(self, dim: usize, other: usize) -> Self {
        Self(B::float_swap_dims(self.0, dim, other))
    }

    /// Slices a range of a dimension.
    pub fn narrow(self, dim: usize, range: Range<usize>) -> Self {
        let mut slices = vec![Slice::full(); self.shape().num_dims()];
        slices[dim] = range.into();
        Self(B::float_slice(self.0, &slices))
    }

    /// Takes elements of another tensor where a mask of the same shape is true.
    pub fn replace(self, mask: BoolTensor<B>, by: Self) -> Self {
        Self(B::float_mask_where(self.0, mask, by.0))
    }

    /// Multiplies matrices.
    pub fn matmul(self, other: Self) -> Self {
        Self(B::float_matmul(self.0, other.0))
    }

    /// Returns where elements are at most `bound`.
    pub fn at_most(&self, bound: f64) -> BoolTensor<B> {
        let bools = get_device_settings::<B>(&self.0.device()).bool_dtype;
        B::float_lower_equal_elem(self.0.clone(), bound.into(), bools)
    }
}
