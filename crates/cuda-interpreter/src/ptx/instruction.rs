//! Instructions as they are run: operands are places in a warp's registers.

use super::Type;

/// A warp's values of one register.
pub type Lanes = [u64; 32];

/// A register's place, a constant's or a special register's.
pub type Slot = u32;

/// A function of two numbers.
pub type Binary = fn(u64, u64) -> u64;

/// A function of registers alone, over all lanes at once.
#[derive(Clone, Copy)]
pub enum Pure {
    One(fn(&Lanes) -> Lanes),
    Two(fn(&Lanes, &Lanes) -> Lanes),
    Three(fn(&Lanes, &Lanes, &Lanes) -> Lanes),
    Four(fn(&Lanes, &Lanes, &Lanes, &Lanes) -> Lanes),
}

impl Pure {
    pub fn arguments(self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Two(_) => 2,
            Self::Three(_) => 3,
            Self::Four(_) => 4,
        }
    }

    /// Its values over as many operands as it has.
    pub fn over(self, [a, b, c, d]: [&Lanes; 4]) -> Lanes {
        match self {
            Self::One(function) => function(a),
            Self::Two(function) => function(a, b),
            Self::Three(function) => function(a, b, c),
            Self::Four(function) => function(a, b, c, d),
        }
    }

    /// Its value of single numbers.
    pub fn once(self, [a, b, c]: [u64; 3]) -> u64 {
        self.over([&[a; 32], &[b; 32], &[c; 32], &[0; 32]])[0]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

impl Space {
    /// What generic addresses of the space have above their offsets. Global memory is the host's, whose addresses end below.
    pub fn window(self) -> u64 {
        match self {
            Self::Shared => 1 << 56,
            Self::Local => 2 << 56,
            Self::Param => 3 << 56,
            Self::Generic | Self::Global => 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: Slot,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Numbers that tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    BF16,
    TF32,
    E4M3,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Self::E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::TF32 => 4,
        }
    }
}

/// What becomes of what a bulk copy brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Replace,
    AddF32,
}

/// What a bulk copy reaches outside of shared memory.
pub enum Outside {
    /// Consecutive bytes.
    Bytes { at: Address, count: Slot },
    /// A box of a tensor.
    Box {
        map: Address,
        coordinates: Vec<Slot>,
    },
}

/// Which way a bulk copy goes.
#[derive(Clone, Copy, Debug)]
pub enum Way<At> {
    /// To shared memory, counted by a barrier.
    In {
        barrier: At,
    },
    Out(Effect),
}

pub struct Bulk {
    pub shared: Address,
    pub outside: Outside,
    pub way: Way<Address>,
}

/// The left operand of a warpgroup's product.
pub enum Left {
    Described(Slot),
    Registers(Vec<Slot>),
}

/// `wgmma.mma_async` (PTX ISA, section 9.7.15).
pub struct GroupProduct {
    pub element: Element,
    pub columns: usize,
    pub sums: Vec<Slot>,
    pub left: Left,
    pub right: Slot,
    pub adds: Slot,
    pub signs: [Slot; 2],
    /// Whether the rows of the operands run along the dimension of the sums.
    pub transposed: [Option<Slot>; 2],
}

/// `mma.sync` with 16 rows and 8 columns (PTX ISA, section 9.7.14).
pub struct Product {
    pub element: Element,
    pub depth: usize,
    pub out: Vec<Slot>,
    pub left: Vec<Slot>,
    pub right: Vec<Slot>,
    pub sums: Vec<Slot>,
}

/// Consecutive numbers in memory, and the registers of a load or a store of them.
pub struct Vector {
    pub space: Space,
    pub kind: Type,
    pub at: Address,
    pub slots: Vec<Slot>,
}

/// A matrix in registers whose places only the instructions on it know (`wmma`; PTX ISA, section 9.7.14.4).
pub struct Fragment {
    pub rows: usize,
    pub columns: usize,
    pub element_bytes: usize,
    pub slots: Vec<Slot>,
}

/// A fragment's place in memory: its first number, numbers from one row or column to the next, and which of them.
pub struct FragmentPlace {
    pub space: Space,
    pub at: Address,
    pub stride: Option<Slot>,
    pub by_rows: bool,
}

/// `wmma.mma`: the sum of a product of fragments and a third.
pub struct FragmentProduct {
    pub element: Element,
    pub out: Fragment,
    pub left: Fragment,
    pub right: Fragment,
    pub sums: Fragment,
}

/// What the threads of a warp tell each other.
pub enum Together {
    Meet,
    Shuffle {
        mode: Shuffle,
        to: Slot,
        valid: Option<Slot>,
        from: Slot,
        lane: Slot,
        clamp: Slot,
    },
    Vote {
        mode: Vote,
        to: Slot,
        from: Slot,
    },
    Match {
        to: Slot,
        from: Slot,
    },
    Reduce {
        function: Pure,
        to: Slot,
        from: Slot,
    },
    Elect {
        to: Slot,
        elected: Slot,
    },
}

pub enum Op {
    Nothing,
    /// What threads wrote tensor cores and the copy engine may read.
    FenceAsync,
    CommitProducts,
    /// Until at most so many groups of products are under way.
    WaitProducts(Slot),
    LoadFragment(Fragment, FragmentPlace),
    StoreFragment(Fragment, FragmentPlace),
    FragmentProduct(Box<FragmentProduct>),
    Pure {
        function: Pure,
        to: Slot,
        from: [Slot; 4],
    },
    /// A predicate, and its opposite where one is asked for.
    Compare {
        function: fn(&Lanes, &Lanes) -> Lanes,
        to: Slot,
        opposite: Option<Slot>,
        from: [Slot; 2],
        combined: Option<(Binary, Slot)>,
    },
    Pack {
        to: Slot,
        from: Vec<Slot>,
        bits: u32,
    },
    Unpack {
        to: Vec<Slot>,
        from: Slot,
        bits: u32,
    },
    Load(Vector),
    Store(Vector),
    /// `function` of what is there and two operands takes its place.
    Atomic {
        space: Space,
        kind: Type,
        function: Pure,
        to: Option<Slot>,
        at: Address,
        from: [Slot; 2],
    },
    Branch(u32),
    Exit,
    Trap,
    Barrier {
        id: Slot,
        threads: Option<Slot>,
        waits: bool,
        /// Where whether any thread says so goes, and what a thread says.
        any: Option<[Slot; 2]>,
    },
    ActiveMask {
        to: Slot,
    },
    /// What those of a warp that are named do together.
    Together {
        members: Slot,
        what: Together,
    },
    LoadMatrices {
        transposed: bool,
        to: Vec<Slot>,
        at: Address,
    },
    StoreMatrices {
        transposed: bool,
        at: Address,
        from: Vec<Slot>,
    },
    TransposeMatrix {
        to: Slot,
        from: Slot,
    },
    Product(Product),
    GroupProduct(Box<GroupProduct>),
    /// `cp.async` of `bytes`, of which `read` come from global memory and the others are 0.
    Copy {
        to: Address,
        from: Address,
        bytes: Slot,
        read: Option<Slot>,
    },
    CommitCopies,
    /// Until at most so many groups of copies are under way.
    WaitCopies(Slot),
    WaitAllCopies,
    Bulk(Box<Bulk>),
    WaitBulk,
    CountedInit {
        at: Address,
        count: Slot,
    },
    CountedArrive {
        at: Address,
        count: Option<Slot>,
        expects: Option<Slot>,
        arrives: bool,
        to: Option<Slot>,
    },
    CountedWait {
        to: Slot,
        at: Address,
        phase: Slot,
    },
}

impl Op {
    /// Calls `each` for the registers that arithmetic, stores and shuffles read.
    ///
    /// # Errors
    ///
    /// That of the first call with one.
    pub fn each_read<E>(&self, each: impl FnMut(Slot) -> Result<(), E>) -> Result<(), E> {
        let read: &[Slot] = match self {
            Self::Pure { function, from, .. } => &from[..function.arguments()],
            Self::Compare { from, .. } => from,
            Self::Pack { from, .. } => from,
            Self::Store(to) => &to.slots,
            Self::Unpack { from, .. }
            | Self::Together {
                what: Together::Shuffle { from, .. },
                ..
            } => std::slice::from_ref(from),
            Self::Product(product) => &product.sums,
            _ => &[],
        };
        read.iter().copied().try_for_each(each)
    }
}

pub struct Instruction {
    pub op: Op,
    /// The predicate under which lanes take part, and whether it has to be false.
    pub guard: Option<(Slot, bool)>,
    pub line: u32,
}

/// Where a thread is.
pub struct Place {
    pub thread: [u32; 3],
    pub threads: [u32; 3],
    pub cube: [u32; 3],
    pub cubes: [u32; 3],
    pub lane: u32,
    pub warp: u32,
    pub dynamic_shared: u32,
}

/// What a special register holds (PTX ISA, section 10).
#[derive(Clone, Copy)]
pub enum Special {
    Axis(fn(&Place) -> [u32; 3], usize),
    Of(fn(&Place) -> u32),
    Clock,
}

impl Special {
    pub fn named(name: &str) -> Option<Self> {
        if let Some((family, part)) = name.split_once('.') {
            let of: fn(&Place) -> [u32; 3] = match family {
                "%tid" => |at| at.thread,
                "%ntid" => |at| at.threads,
                // A cube without a cluster is a cluster of its own.
                "%ctaid" | "%clusterid" => |at| at.cube,
                "%nctaid" | "%nclusterid" => |at| at.cubes,
                "%cluster_ctaid" => |_| [0; 3],
                "%cluster_nctaid" => |_| [1; 3],
                _ => return None,
            };
            let axis = ["x", "y", "z"].iter().position(|axis| *axis == part)?;
            return Some(Self::Axis(of, axis));
        }
        Some(Self::Of(match name {
            "%laneid" => |at| at.lane,
            "%warpid" => |at| at.warp,
            "%dynamic_smem_size" => |at| at.dynamic_shared,
            "%lanemask_eq" => |at| 1 << at.lane,
            "%lanemask_lt" => |at| (1 << at.lane) - 1,
            "%lanemask_le" => |at| u32::MAX >> (31 - at.lane),
            "%lanemask_gt" => |at| !(u32::MAX >> (31 - at.lane)),
            "%lanemask_ge" => |at| u32::MAX << at.lane,
            "%cluster_ctarank" => |_| 0,
            "%cluster_nctarank" => |_| 1,
            "%clock" | "%clock64" | "%globaltimer" => return Some(Self::Clock),
            _ => return None,
        }))
    }

    pub fn value(self, at: &Place) -> u32 {
        match self {
            Self::Axis(of, axis) => of(at)[axis],
            Self::Of(of) => of(at),
            Self::Clock => 0,
        }
    }
}
