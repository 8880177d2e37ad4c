//! Parses PTX modules: declarations, scopes and labels. `decode` handles instructions.

use std::collections::HashMap;

use super::decode::decode;
use super::op::Op;
use super::{Instruction, Kernel, Module, Parameter};
use crate::error::Unread;
use crate::ptx::{Argument, Slot, Special, Token, Type, number, stripped, tokens};

/// Start of shared memory. On Hopper the bytes below are reserved.
const SHARED_START: usize = 1024;
/// Alignment of dynamic shared memory, as swizzled bulk copies require.
const DYNAMIC_ALIGNMENT: usize = 1024;

/// Slot of `_`, which is never read.
const SINK: Slot = 0;

impl Module {
    /// # Errors
    ///
    /// [`Unread`] for text that is not PTX, and for unknown instructions.
    pub fn parse(text: &str) -> Result<Self, Unread> {
        let bare = stripped(text);
        let mut parser = Parser::new(tokens(&bare));
        parser.shared_symbols()?;
        parser.declarations()?;
        Ok(parser.module)
    }
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
    symbols: HashMap<&'a str, u64>,
    static_shared: usize,
    module: Module,
    /// The kernel being parsed.
    kernel: Kernel,
    scopes: Vec<Scope<'a>>,
    open: Vec<usize>,
    jumps: Vec<(usize, &'a str, Vec<usize>)>,
}

#[derive(Default)]
struct Scope<'a> {
    registers: HashMap<String, Slot>,
    labels: HashMap<&'a str, u32>,
}

impl Kernel {
    fn new(name: String, parameters: Vec<Parameter>, static_shared: usize) -> Self {
        Self {
            name,
            parameters,
            code: Vec::new(),
            slots: SINK + 1,
            constants: HashMap::new(),
            specials: Vec::new(),
            static_shared,
            local_bytes: 0,
        }
    }
}

impl<'a> Parser<'a> {
    fn new(tokens: Vec<Token<'a>>) -> Self {
        Self {
            tokens,
            at: 0,
            symbols: HashMap::new(),
            static_shared: SHARED_START,
            module: Module {
                kernels: Vec::new(),
                arrays: Vec::new(),
            },
            kernel: Kernel::new(String::new(), Vec::new(), 0),
            scopes: Vec::new(),
            open: Vec::new(),
            jumps: Vec::new(),
        }
    }

    fn unread<T>(&self, what: impl Into<String>) -> Result<T, Unread> {
        let last = self.tokens.get(self.at).or(self.tokens.last());
        Err(Unread {
            line: last.map_or(0, |token| token.line),
            what: what.into(),
        })
    }

    fn peek(&self) -> &'a str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    fn next(&mut self) -> &'a str {
        let text = self.peek();
        self.at += 1;
        text
    }

    fn takes(&mut self, text: &str) -> bool {
        let found = self.peek() == text;
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, text: &str) -> Result<(), Unread> {
        match self.takes(text) {
            true => Ok(()),
            false => self.unread(format!("expected {text:?}, found {:?}", self.peek())),
        }
    }

    fn skip_past(&mut self, end: &str) {
        while self.at < self.tokens.len() && self.next() != end {}
    }

    fn integer(&mut self) -> Result<usize, Unread> {
        match number(self.peek()) {
            Some(value) => {
                self.at += 1;
                Ok(value as usize)
            }
            None => self.unread(format!("expected a number, found {:?}", self.peek())),
        }
    }

    /// Parses an integer in two's complement.
    fn signed(&mut self) -> Result<u64, Unread> {
        let negative = self.takes("-");
        let value = self.integer()? as u64;
        Ok(if negative {
            value.wrapping_neg()
        } else {
            value
        })
    }

    /// Parses a variable's alignment, name and bytes after its state space: `.align 16 .b8 name[64]`.
    fn variable(&mut self) -> Result<(usize, &'a str, usize), Unread> {
        let (mut align, mut kind) = (0, Type::Bits(8));
        while self.peek().starts_with('.') {
            let modifier = self.next();
            if modifier == ".align" {
                align = self.integer()?;
            } else if let Some(found) = Type::named(&modifier[1..]) {
                kind = found;
            }
        }
        let name = self.next();
        let mut count = 1;
        while self.takes("[") {
            count *= if self.peek() == "]" {
                0
            } else {
                self.integer()?
            };
            self.expect("]")?;
        }
        Ok((align.max(kind.bytes()), name, count * kind.bytes()))
    }

    /// Assigns addresses to shared variables, wherever they are declared. The dynamic one comes after the others.
    fn shared_symbols(&mut self) -> Result<(), Unread> {
        let mut dynamic = Vec::new();
        while self.at < self.tokens.len() {
            let is_extern = self.peek() == ".extern";
            if self.next() != ".shared" {
                if !is_extern || !self.takes(".shared") {
                    continue;
                }
                dynamic.push(self.variable()?.1);
                continue;
            }
            let (align, name, bytes) = self.variable()?;
            let start = self.static_shared.next_multiple_of(align);
            self.symbols.insert(name, start as u64);
            self.static_shared = start + bytes;
        }
        if !dynamic.is_empty() {
            self.static_shared = self.static_shared.next_multiple_of(DYNAMIC_ALIGNMENT);
        }
        for name in dynamic {
            self.symbols.insert(name, self.static_shared as u64);
        }
        self.at = 0;
        Ok(())
    }

    fn declarations(&mut self) -> Result<(), Unread> {
        while self.at < self.tokens.len() {
            match self.next() {
                ".version" | ".target" => {
                    self.next();
                    while self.takes(",") {
                        self.next();
                    }
                }
                ".address_size" => self.at += 1,
                ".visible" | ".weak" => {}
                ".extern" | ".shared" => self.skip_past(";"),
                ".global" | ".const" => self.array()?,
                ".entry" => self.kernel()?,
                ".func" => return self.unread("functions apart from kernels"),
                other => return self.unread(format!("unexpected {other:?}")),
            }
        }
        Ok(())
    }

    fn array(&mut self) -> Result<(), Unread> {
        let kind = self.tokens[self.at..]
            .iter()
            .find_map(|token| Type::named(token.text.strip_prefix('.')?));
        let (_, name, bytes) = self.variable()?;
        let mut content = vec![0; bytes];
        if self.takes("=") {
            let size = kind.map_or(1, Type::bytes);
            self.expect("{")?;
            for part in content.chunks_mut(size) {
                let value = self.signed()?;
                part.copy_from_slice(&value.to_le_bytes()[..size]);
                if !self.takes(",") {
                    break;
                }
            }
            self.expect("}")?;
        }
        self.expect(";")?;
        let content = content.into_boxed_slice();
        self.symbols.insert(name, content.as_ptr() as u64);
        self.module.arrays.push(content);
        Ok(())
    }

    fn kernel(&mut self) -> Result<(), Unread> {
        let name = self.next().to_owned();
        let (mut parameters, mut end) = (Vec::new(), 0_usize);
        if self.takes("(") {
            while !self.takes(")") {
                self.expect(".param")?;
                let (align, name, bytes) = self.variable()?;
                let offset = end.next_multiple_of(align);
                self.symbols.insert(name, offset as u64);
                parameters.push(Parameter { offset, bytes });
                end = offset + bytes;
                self.takes(",");
            }
        }
        while self.peek() != "{" {
            self.at += 1;
        }
        self.at += 1;
        self.scopes = vec![Scope::default()];
        self.open = vec![0];
        self.kernel = Kernel::new(name, parameters, self.static_shared);
        self.kernel.code = self.body()?;
        let none = Kernel::new(String::new(), Vec::new(), 0);
        let read = std::mem::replace(&mut self.kernel, none);
        self.module.kernels.push(read);
        Ok(())
    }

    fn body(&mut self) -> Result<Vec<Instruction>, Unread> {
        let mut code = Vec::new();
        while !self.open.is_empty() {
            let scope = *self.open.last().expect("a scope is open");
            match self.peek() {
                "" => return self.unread("a kernel has no end"),
                "{" => {
                    self.at += 1;
                    self.open.push(self.scopes.len());
                    self.scopes.push(Scope::default());
                }
                "}" => {
                    self.at += 1;
                    self.open.pop();
                }
                ";" => self.at += 1,
                ".reg" => self.registers(scope)?,
                ".shared" | ".pragma" => self.skip_past(";"),
                ".local" => {
                    self.at += 1;
                    let (align, name, bytes) = self.variable()?;
                    let start = self.kernel.local_bytes.next_multiple_of(align);
                    self.symbols.insert(name, start as u64);
                    self.kernel.local_bytes = start + bytes;
                    self.expect(";")?;
                }
                label
                    if self
                        .tokens
                        .get(self.at + 1)
                        .is_some_and(|token| token.text == ":") =>
                {
                    self.at += 2;
                    self.scopes[scope].labels.insert(label, code.len() as u32);
                }
                _ => {
                    let instruction = self.instruction(code.len())?;
                    code.push(instruction);
                }
            }
        }
        // A kernel may end without an `exit`.
        code.push(Instruction {
            op: self.decode("exit", Vec::new(), 0)?,
            guard: None,
            line: 0,
        });
        for (at, label, scopes) in std::mem::take(&mut self.jumps) {
            let target = scopes
                .iter()
                .rev()
                .find_map(|&scope| self.scopes[scope].labels.get(label));
            match target {
                Some(&target) => code[at].op = Op::jump(target),
                None => return self.unread(format!("no label {label}")),
            }
        }
        Ok(code)
    }

    fn registers(&mut self, scope: usize) -> Result<(), Unread> {
        self.at += 2;
        loop {
            let name = self.next();
            let names = if self.takes("<") {
                let count = self.integer()?;
                self.expect(">")?;
                (0..count).map(|index| format!("{name}{index}")).collect()
            } else {
                vec![name.to_owned()]
            };
            for name in names {
                let slot = self.new_slot();
                self.scopes[scope].registers.insert(name, slot);
            }
            if !self.takes(",") {
                return self.expect(";");
            }
        }
    }

    fn instruction(&mut self, at: usize) -> Result<Instruction, Unread> {
        let line = self.tokens[self.at].line;
        let mut guard = None;
        if self.takes("@") {
            let negated = self.takes("!");
            guard = Some((self.slot()?, negated));
        }
        let opcode = self.next();
        if opcode == "bra" || opcode == "bra.uni" {
            let label = self.next();
            self.jumps.push((at, label, self.open.clone()));
            self.expect(";")?;
            return Ok(Instruction {
                op: Op::jump(0),
                guard,
                line,
            });
        }
        let mut arguments = Vec::new();
        while !self.takes(";") {
            arguments.push(self.argument()?);
            if self.takes("|") {
                let Some(Argument::Slot(first)) = arguments.pop() else {
                    return self.unread("a pair of what are no registers");
                };
                arguments.push(Argument::Pair(first, self.slot()?));
            }
            if !self.takes(",") && self.peek() != ";" {
                return self.unread(format!("unexpected {:?} behind an operand", self.peek()));
            }
        }
        let op = self.decode(opcode, arguments, line)?;
        Ok(Instruction { op, guard, line })
    }

    fn decode(&mut self, opcode: &str, arguments: Vec<Argument>, line: u32) -> Result<Op, Unread> {
        decode(opcode, arguments, |value| self.constant(value))
            .map_err(|what| Unread { line, what })
    }

    fn argument(&mut self) -> Result<Argument, Unread> {
        if self.takes("{") {
            return Ok(Argument::Slots(self.slot_list()?));
        }
        if !self.takes("[") {
            return Ok(Argument::Slot(self.slot()?));
        }
        let base = self.slot()?;
        let mut offset = 0;
        if self.takes("+") {
            offset = self.signed()? as i64;
        }
        if self.takes(",") {
            self.expect("{")?;
            let coordinates = self.slot_list()?;
            self.expect("]")?;
            return Ok(Argument::Tensor(base, offset, coordinates));
        }
        self.expect("]")?;
        Ok(Argument::Address(base, offset))
    }

    fn slot_list(&mut self) -> Result<Vec<Slot>, Unread> {
        let mut slots = Vec::new();
        while !self.takes("}") {
            slots.push(self.slot()?);
            self.takes(",");
        }
        Ok(slots)
    }

    fn new_slot(&mut self) -> Slot {
        self.kernel.slots += 1;
        self.kernel.slots - 1
    }

    fn constant(&mut self, value: u64) -> Slot {
        let slot = self.kernel.slots;
        let held = *self.kernel.constants.entry(value).or_insert(slot);
        self.kernel.slots += Slot::from(held == slot);
        held
    }

    /// Parses an operand and returns the slot of its value: a register, a number or a name.
    fn slot(&mut self) -> Result<Slot, Unread> {
        let text = self.peek();
        if text == "-" || number(text).is_some() {
            let value = self.signed()?;
            return Ok(self.constant(value));
        }
        let mut scopes = self.open.iter().rev();
        let found = scopes.find_map(|&scope| self.scopes[scope].registers.get(text));
        let slot = match (found, self.symbols.get(text), Special::named(text)) {
            (Some(&slot), ..) => slot,
            _ if text == "_" => SINK,
            _ if text == "WARP_SZ" => self.constant(32),
            (None, Some(&value), _) => self.constant(value),
            (None, None, Some(special)) => {
                let slot = self.new_slot();
                self.kernel.specials.push((slot, special));
                slot
            }
            (None, None, None) => return self.unread(format!("no register or variable {text:?}")),
        };
        self.at += 1;
        Ok(slot)
    }
}
