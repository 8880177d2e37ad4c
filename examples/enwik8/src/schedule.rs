//! Learning rate: linear warm-up, then cosine decay to zero (§6 of the paper).
//!
//! A function of the step alone, so that a resumed run needs no scheduler state. (Burn's schedulers can produce the same curve, but their records would have
//! to be stored and restored.)

use std::f64::consts::PI;

/// Learning rate that rises from `peak / warmup` in the first step to `peak` over `warmup` steps, then falls to 0 at `steps`.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub peak: f64,
    /// Steps of the linear rise.
    pub warmup: usize,
    /// Total steps of the run.
    pub steps: usize,
}

impl Schedule {
    /// Returns the learning rate of step `step`, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let decay = (self.steps.max(self.warmup + 1) - self.warmup) as f64;
        let progress = ((step - self.warmup) as f64 / decay).min(1.0);
        self.peak * 0.5 * (1.0 + (PI * progress).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_zero() {
        let schedule = Schedule {
            peak: 1.0,
            warmup: 4,
            steps: 12,
        };
        let rates: Vec<_> = (0..=12).map(|step| schedule.learning_rate(step)).collect();
        assert_eq!(rates[..4], [0.25, 0.5, 0.75, 1.0]);
        assert_eq!(rates[4], 1.0);
        assert!((rates[8] - 0.5).abs() < 1e-12);
        assert!(rates[12].abs() < 1e-12);
        assert!(rates[4..].windows(2).all(|pair| pair[1] <= pair[0]));
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_is_all_warm_up() {
        let schedule = Schedule {
            peak: 2.0,
            warmup: 10,
            steps: 5,
        };
        assert_eq!(schedule.learning_rate(4), 1.0);
        assert_eq!(schedule.learning_rate(10), 2.0);
    }
}
