//! Operands of instructions: slots in a warp's registers.

/// Values of one register in all lanes.
pub type Lanes = [u64; 32];

/// Index of a register, a constant or a special register.
pub type Slot = u32;

/// A function of two numbers.
pub type Binary = fn(u64, u64) -> u64;

/// A function of registers alone, applied to all lanes at once.
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

    /// Applies the function to as many operands as it has.
    pub fn over(self, [a, b, c, d]: [&Lanes; 4]) -> Lanes {
        match self {
            Self::One(function) => function(a),
            Self::Two(function) => function(a, b),
            Self::Three(function) => function(a, b, c),
            Self::Four(function) => function(a, b, c, d),
        }
    }

    /// Applies the function to single numbers.
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
    /// Returns the high bits of generic addresses of the space. Global addresses are host addresses, which have none.
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

/// Position of a thread.
pub struct Place {
    pub thread: [u32; 3],
    pub threads: [u32; 3],
    pub cube: [u32; 3],
    pub cubes: [u32; 3],
    pub lane: u32,
    pub warp: u32,
    pub dynamic_shared: u32,
}

/// Content of a special register (PTX ISA, section 10).
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
                // A cube without a cluster is its own cluster.
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
