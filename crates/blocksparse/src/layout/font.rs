//! The font of every picture, embedded, so that drawing needs no fonts on the system.

use plotters::style::{FontStyle, register_font};

/// Makes "sans-serif" the embedded font for plotters' `ab_glyph` backend. Calling it again does nothing new.
pub fn register() {
    for style in [FontStyle::Normal, FontStyle::Bold] {
        // Fails only for bytes that are no font; these are one.
        let _ = register_font("sans-serif", style, epaint_default_fonts::UBUNTU_LIGHT);
    }
}
