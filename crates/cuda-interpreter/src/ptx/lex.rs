//! Tokens of PTX text.

/// A word, a number or a symbol, and its line, starting at 1.
#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    pub text: &'a str,
    pub line: u32,
}

/// Blanks comments and removes debug information: lines of `.loc` and `.file`, and everything from the first
/// section on.
pub fn stripped(text: &str) -> String {
    let mut bare = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('/') {
        let (before, from) = rest.split_at(start);
        bare.push_str(before);
        let end = if from.starts_with("/*") {
            from.find("*/").map_or(from.len(), |end| end + 2)
        } else if from.starts_with("//") {
            from.find('\n').unwrap_or(from.len())
        } else {
            bare.push('/');
            1
        };
        bare.extend(from[..end].chars().filter(|&letter| letter == '\n'));
        rest = &from[end..];
    }
    bare.push_str(rest);
    let code = bare
        .lines()
        .map(|line| match line.split_whitespace().next() {
            Some(".loc" | ".file") => "",
            _ => line.trim_start(),
        });
    let mut lines = String::with_capacity(bare.len());
    for line in code.take_while(|line| !line.starts_with(".section")) {
        lines.push_str(line);
        lines.push('\n');
    }
    lines
}

/// Returns the tokens of stripped text. A word contains the characters of names, numbers and opcodes, including `::`.
pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let is_word = |at: usize| {
        let letter = bytes[at];
        letter.is_ascii_alphanumeric() || matches!(letter, b'_' | b'$' | b'%' | b'.')
    };
    let is_path = |at: usize| bytes[at..].starts_with(b"::");
    let (mut tokens, mut line, mut at) = (Vec::new(), 1, 0);
    while at < bytes.len() {
        let (start, letter) = (at, bytes[at]);
        at += 1;
        if letter == b'"' {
            let end = text[at..].find('"');
            at = end.map_or(bytes.len(), |end| at + end + 1);
        } else if is_word(start) {
            while at < bytes.len() && (is_word(at) || is_path(at)) {
                at += if is_path(at) { 2 } else { 1 };
            }
        }
        line += u32::from(letter == b'\n');
        if !letter.is_ascii_whitespace() {
            let text = &text[start..at];
            tokens.push(Token { text, line });
        }
    }
    tokens
}

/// Parses a PTX number: an integer in two's complement, or the bits of a float.
pub fn number(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(u64::from);
    }
    if let Some(bits) = text.strip_prefix("0d").or(text.strip_prefix("0D")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let digits = text.trim_end_matches('U');
    if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok();
    }
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_debug_information_are_no_tokens() {
        let text =
            "a /* b\n c */ d; // e\n.loc 1 2 3\n.local f.g::h [i+4], -1;\n.section .debug {\n x }";
        let bare = stripped(text);
        let found: Vec<(&str, u32)> = tokens(&bare)
            .iter()
            .map(|token| (token.text, token.line))
            .collect();
        let expected = [
            ("a", 1),
            ("d", 2),
            (";", 2),
            (".local", 4),
            ("f.g::h", 4),
            ("[", 4),
            ("i", 4),
            ("+", 4),
            ("4", 4),
            ("]", 4),
            (",", 4),
            ("-", 4),
            ("1", 4),
            (";", 4),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn numbers_are_integers_or_bits() {
        assert_eq!(number("0f3F800000"), Some(1f32.to_bits().into()));
        assert_eq!(number("0d3FF0000000000000"), Some(1f64.to_bits()));
        assert_eq!(number("0x1F"), Some(31));
        assert_eq!(number("7U"), Some(7));
        assert_eq!(number("%r1"), None);
    }
}
