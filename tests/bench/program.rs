//! What programs read of their arguments, and print of their times.

/// The argument of that place, above 0, or what it is where it is left out; none if it is something else.
pub fn number(args: &[String], place: usize, otherwise: usize) -> Option<usize> {
    match args.get(place) {
        None => Some(otherwise),
        Some(text) => text.parse().ok().filter(|&number| number > 0),
    }
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
