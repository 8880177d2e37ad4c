//! Reads the operands of an instruction.

use super::instruction::{Address, Slot, Space};

/// An operand as written.
#[derive(Clone, Debug)]
pub enum Argument {
    Slot(Slot),
    Pair(Slot, Slot),
    Slots(Vec<Slot>),
    Address(Slot, i64),
    Tensor(Slot, i64, Vec<Slot>),
}

/// The decoded value, or a message about what is unknown.
pub type Decoded<T> = Result<T, String>;

/// An opcode and its unread operands.
pub struct Reader<'a> {
    pub opcode: &'a str,
    pub modifiers: Vec<&'a str>,
    pub arguments: std::vec::IntoIter<Argument>,
}

impl Reader<'_> {
    pub fn unknown<T>(&self) -> Decoded<T> {
        Err(format!("`{}` is not known", self.opcode))
    }

    fn wanted<T>(&self, what: &str, found: Option<Argument>) -> Decoded<T> {
        Err(format!("`{}` takes {what} here: {found:?}", self.opcode))
    }

    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// Returns the meaning of the modifier that the instruction has.
    pub fn one_of<T: Copy>(&self, meanings: &[(&str, T)]) -> Decoded<T> {
        let found = meanings.iter().find(|(name, _)| self.has(name));
        found.map_or_else(|| self.unknown(), |&(_, meaning)| Ok(meaning))
    }

    pub fn left(&self) -> usize {
        self.arguments.len()
    }

    pub fn slot(&mut self) -> Decoded<Slot> {
        match self.arguments.next() {
            Some(Argument::Slot(slot)) => Ok(slot),
            other => self.wanted("a register", other),
        }
    }

    pub fn optional(&mut self) -> Decoded<Option<Slot>> {
        if self.left() == 0 {
            Ok(None)
        } else {
            self.slot().map(Some)
        }
    }

    /// Reads a result, and a second one after `|`.
    pub fn pair(&mut self) -> Decoded<(Slot, Option<Slot>)> {
        match self.arguments.next() {
            Some(Argument::Slot(slot)) => Ok((slot, None)),
            Some(Argument::Pair(first, second)) => Ok((first, Some(second))),
            other => self.wanted("a register", other),
        }
    }

    /// Reads one register or several.
    pub fn slots(&mut self) -> Decoded<Vec<Slot>> {
        match self.arguments.next() {
            Some(Argument::Slot(slot)) => Ok(vec![slot]),
            Some(Argument::Slots(slots)) => Ok(slots),
            other => self.wanted("registers", other),
        }
    }

    pub fn address(&mut self) -> Decoded<Address> {
        match self.arguments.next() {
            Some(Argument::Address(base, offset)) => Ok(Address { base, offset }),
            other => self.wanted("an address", other),
        }
    }

    pub fn tensor(&mut self) -> Decoded<(Address, Vec<Slot>)> {
        match self.arguments.next() {
            Some(Argument::Tensor(base, offset, coordinates)) => {
                Ok((Address { base, offset }, coordinates))
            }
            other => self.wanted("a tensor", other),
        }
    }

    pub fn space(&self) -> Space {
        let named = |family: &str| {
            self.modifiers
                .iter()
                .any(|text| text.split("::").next() == Some(family))
        };
        match () {
            () if named("global") || named("const") => Space::Global,
            () if named("shared") => Space::Shared,
            () if named("local") => Space::Local,
            () if named("param") => Space::Param,
            () => Space::Generic,
        }
    }
}
