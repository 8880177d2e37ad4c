//! The font of all pictures, embedded so that drawing needs no system fonts.

use plotters::style::{FontStyle, register_font};

/// Registers the embedded font as "sans-serif" in plotters' `ab_glyph` backend. Repeated calls have no further effect.
pub fn register() {
    for style in [FontStyle::Normal, FontStyle::Bold] {
        // Fails only for bytes that are not a font; these are a font.
        let _ = register_font("sans-serif", style, epaint_default_fonts::UBUNTU_LIGHT);
    }
}
