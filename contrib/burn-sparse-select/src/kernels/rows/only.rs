//! Lists that are wanted, where a number of each decides on the device.

use cubecl::prelude::*;
use cubecl::server::Handle;

use blocksparse_cubecl::args::optional;

/// Of lists those that are wanted.
#[derive(Clone, Copy, Debug)]
pub struct OnlyLists<'a> {
    /// `[lists]`, f32.
    pub numbers: &'a Handle,
    pub lists: usize,
    pub limit: f32,
    /// Whether lists are wanted whose number is at least the limit, or all others.
    pub above: bool,
}

/// The lists' numbers as a launch has them.
pub(crate) fn numbers_of<T: LaunchArg<RuntimeArg = BufferArg>>(
    only: Option<OnlyLists>,
) -> ComptimeOptionArgs<T> {
    optional(
        only.map(|only| only.numbers),
        only.map_or(0, |only| only.lists),
    )
}

/// Whether a list is wanted: each is where there are no numbers.
#[cube]
pub(crate) fn is_wanted(
    only: &ComptimeOption<Box<[f32]>>,
    list: usize,
    limit: f32,
    #[comptime] above: bool,
) -> bool {
    let mut wanted = true.runtime();
    #[comptime]
    match only {
        ComptimeOption::Some(numbers) => {
            let is_above = numbers[list] >= limit;
            wanted = match comptime!(above) {
                true => is_above,
                false => !is_above,
            };
        }
        ComptimeOption::None => {}
    }
    wanted
}
