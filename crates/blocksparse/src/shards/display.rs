//! Prints a plan as a table.

use std::fmt;

use super::ShardPlan;
use super::reach::count;

/// Maximum number of devices that are listed individually.
const LISTED: usize = 16;

impl fmt::Display for ShardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layout, devices) = (&self.layout, self.devices());
        writeln!(
            f,
            "{}: {} positions in blocks of {} over {devices} devices, {} heads, {} KV heads",
            layout.name(),
            layout.seq_q(),
            layout.block_size(),
            layout.heads(),
            self.kv_heads,
        )?;
        let kind = match self.pieces() {
            1 => "1 piece per device (contiguous)".to_owned(),
            2 => "2 pieces per device (zigzag)".to_owned(),
            pieces => format!("{pieces} pieces per device (striped)"),
        };
        write!(f, "{kind}")?;
        let least = self.candidates.iter().map(|candidate| candidate.cost);
        let least = least.fold(f64::INFINITY, f64::min);
        for (index, candidate) in self.candidates.iter().enumerate() {
            let before = if index == 0 { "; cost by pieces:" } else { "," };
            write!(
                f,
                "{before} {} × {:.2}",
                candidate.pieces,
                candidate.cost / least
            )?;
        }
        writeln!(f)?;
        let mean = self.pairs.iter().sum::<u64>() as f64 / devices as f64;
        writeln!(
            f,
            "device   positions            pairs  of mean  keys received  of others'   keys sent"
        )?;
        for (device, sent) in self.sent.iter().enumerate().take(LISTED) {
            let own = count(&self.positions(device));
            let (pairs, received) = (self.pairs(device), self.keys_received(device));
            let others = ((layout.seq_kv() - own) * self.kv_heads).max(1);
            writeln!(
                f,
                "{device:>6}  {own:>10}  {pairs:>15}  {:>7.3}  {received:>13}  {:>9.2}%  {sent:>10}",
                pairs as f64 / mean.max(1.0),
                received as f64 / others as f64 * 100.0,
            )?;
        }
        if devices > LISTED {
            writeln!(f, "   …    {} devices more", devices - LISTED)?;
        }
        let most = |numbers: &mut dyn Iterator<Item = usize>| numbers.max().unwrap_or_default();
        write!(
            f,
            "most per device: {:.3} × the mean's pairs, {} keys received ({:.2}% of all others'), {} sent",
            self.pairs.iter().copied().max().unwrap_or_default() as f64 / mean.max(1.0),
            most(&mut (0..devices).map(|device| self.keys_received(device))),
            self.reach() * 100.0,
            most(&mut self.sent.iter().copied()),
        )?;
        if self.reach() > 0.99 {
            write!(
                f,
                "\nthe pattern reaches everything: a device receives nearly all keys, as in ring attention"
            )?;
        }
        Ok(())
    }
}
