//! Barriers in shared memory that count arrivals and bytes (`mbarrier`; PTX ISA, section 9.7.13.15).

use crate::error::Fault;

/// The 64 bits of a barrier: missing arrivals, arrivals per phase, missing bytes, and the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    missing: u16,
    arrivals: u16,
    bytes: i32,
    odd: bool,
}

const BYTES_LOW: u32 = 32;
const BYTES_BITS: u32 = 31;

impl Counted {
    /// # Errors
    ///
    /// [`Fault::Barrier`] for an invalid count.
    pub fn new(arrivals: u64) -> Result<Self, Fault> {
        match u16::try_from(arrivals) {
            Ok(arrivals) if arrivals > 0 => Ok(Self {
                missing: arrivals,
                arrivals,
                bytes: 0,
                odd: false,
            }),
            _ => Err(Fault::Barrier(format!("of {arrivals} arrivals"))),
        }
    }

    pub fn from_bits(bits: u64) -> Self {
        let bytes = (bits >> BYTES_LOW) as u32 & ((1 << BYTES_BITS) - 1);
        Self {
            missing: bits as u16,
            arrivals: (bits >> 16) as u16,
            bytes: (bytes << 1) as i32 >> 1,
            odd: bits >> 63 == 1,
        }
    }

    pub fn bits(self) -> u64 {
        let bytes = self.bytes as u32 & ((1 << BYTES_BITS) - 1);
        u64::from(self.missing)
            | u64::from(self.arrivals) << 16
            | u64::from(bytes) << BYTES_LOW
            | u64::from(self.odd) << 63
    }

    /// Expects `bytes` more bytes, or fewer if negative.
    pub fn expecting(mut self, bytes: i32) -> Self {
        self.bytes += bytes;
        self.ended()
    }

    /// # Errors
    ///
    /// [`Fault::Barrier`] if more threads arrive than a phase expects.
    pub fn arrived(mut self, count: u64) -> Result<Self, Fault> {
        let left = u64::from(self.missing).checked_sub(count);
        let Some(left) = left else {
            return Err(Fault::Barrier(format!(
                "{count} arrivals where {} are missing",
                self.missing
            )));
        };
        self.missing = left as u16;
        Ok(self.ended())
    }

    fn ended(mut self) -> Self {
        if self.missing == 0 && self.bytes == 0 {
            self.odd = !self.odd;
            self.missing = self.arrivals;
        }
        self
    }

    /// Returns whether the phase with this parity is complete.
    pub fn is_over(self, odd: bool) -> bool {
        self.odd != odd
    }

    pub fn is_odd(self) -> bool {
        self.odd
    }

    /// Returns whether this can be an initialized barrier.
    pub fn is_initialised(self) -> bool {
        self.arrivals > 0 && self.missing <= self.arrivals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_ends_with_its_last_arrival_and_its_last_byte() {
        let barrier = Counted::new(2).unwrap().arrived(1).unwrap();
        assert!(!barrier.is_over(false));
        // Bytes may arrive before they are expected.
        let early = Counted::from_bits(barrier.expecting(-64).bits());
        let waiting = early.expecting(128).arrived(1).unwrap();
        assert!(!waiting.is_over(false));
        let over = Counted::from_bits(waiting.bits()).expecting(-64);
        assert!(over.is_over(false) && !over.is_over(true));
        assert!(over.arrived(3).is_err());
    }
}
