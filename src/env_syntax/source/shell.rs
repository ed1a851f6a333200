//! Commands of a POSIX shell, as far as they set variables.

use std::collections::BTreeSet;

use super::{Source, clip, concerns_nccl, is_name};

/// A word of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) line: usize,
    pub(super) text: String,
    /// Whether a part is only known at run time.
    pub(super) is_open: bool,
    /// Whether any of it was quoted.
    pub(super) is_quoted: bool,
}

/// A command: its words, without redirections being understood.
type Simple = Vec<Word>;

/// Splits a text into commands. Quotes that are not closed are told with their line.
fn commands(text: &str) -> (Vec<Simple>, Option<usize>) {
    let mut splitter = Splitter::default();
    let lines: Vec<&str> = text.split('\n').collect();
    let mut index = 0;
    while let Some(content) = lines.get(index) {
        index += 1;
        if let Some(end) = splitter.take_line(index, content) {
            // One that never ends is no here-document but something that is not understood here.
            let length = lines[index..].iter().position(|content| content.trim_start_matches('\t') == end);
            index += length.map_or(0, |length| length + 1);
        }
    }
    let open_quote = splitter.quote.map(|(_, line)| line);
    splitter.end_command();
    (splitter.commands, open_quote)
}

#[derive(Default)]
struct Splitter {
    commands: Vec<Simple>,
    command: Simple,
    word: Option<Word>,
    /// The quote that is open, and where it was opened.
    quote: Option<(char, usize)>,
}

impl Splitter {
    fn word(&mut self, line: usize) -> &mut Word {
        self.word.get_or_insert_with(|| Word { line, text: String::new(), is_open: false, is_quoted: false })
    }

    fn end_word(&mut self) {
        self.command.extend(self.word.take());
    }

    fn end_command(&mut self) {
        self.end_word();
        if !self.command.is_empty() {
            self.commands.push(std::mem::take(&mut self.command));
        }
    }

    /// Takes in a line; returns the word that ends a here-document that begins after it.
    fn take_line(&mut self, line: usize, content: &str) -> Option<String> {
        let mut here_document = None;
        let mut signs = content.chars().peekable();
        while let Some(sign) = signs.next() {
            match self.quote {
                Some(('\'', _)) if sign != '\'' => self.word(line).text.push(sign),
                Some(('"', _)) if sign != '"' => match sign {
                    '\\' => match signs.next() {
                        Some(next @ ('"' | '\\' | '$' | '`')) => self.word(line).text.push(next),
                        Some(next) => self.word(line).text.extend(['\\', next]),
                        // The line goes on.
                        None => return here_document,
                    },
                    '$' | '`' => self.word(line).is_open = true,
                    _ => self.word(line).text.push(sign),
                },
                Some(_) => self.quote = None,
                None => match sign {
                    '\'' | '"' => {
                        self.quote = Some((sign, line));
                        self.word(line).is_quoted = true;
                    }
                    '\\' => match signs.next() {
                        Some(next) => self.word(line).text.push(next),
                        None => return here_document,
                    },
                    '$' | '`' => {
                        self.word(line).is_open = true;
                        if signs.peek() == Some(&'(') || signs.peek() == Some(&'{') {
                            skip_bracket(&mut signs);
                        }
                    }
                    '#' if self.word.is_none() => break,
                    ' ' | '\t' => self.end_word(),
                    '<' if signs.peek() == Some(&'<') => {
                        self.end_word();
                        signs.next();
                        // `<<<` hands a word over, and no document follows.
                        if signs.next_if_eq(&'<').is_some() {
                            continue;
                        }
                        let rest: String = signs.by_ref().collect();
                        let end = rest.trim_start_matches(['<', '-', ' ']).split([' ', ';', '>', '|']).next();
                        here_document = end.map(|end| end.trim_matches(['\'', '"', '\\']).to_owned());
                        break;
                    }
                    ';' | '&' | '|' | '(' | ')' => self.end_command(),
                    _ => self.word(line).text.push(sign),
                },
            }
        }
        if self.quote.is_some() {
            self.word(line).text.push('\n');
        } else {
            self.end_command();
        }
        here_document.filter(|end| !end.is_empty())
    }
}

/// Skips what stands in a bracket that begins here, as far as it ends in this line.
fn skip_bracket(signs: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    let (open, close) = if signs.peek() == Some(&'(') { ('(', ')') } else { ('{', '}') };
    let mut depth = 0_usize;
    for sign in signs.by_ref() {
        if sign == open {
            depth += 1;
        } else if sign == close {
            depth -= 1;
            if depth == 0 {
                return;
            }
        }
    }
}

/// Words that may stand before a command without being one.
const KEYWORDS: [&str; 9] = ["if", "then", "else", "elif", "do", "while", "until", "!", "{"];
/// Words after which variables may be set for the command that follows.
const PREFIXES: [&str; 5] = ["env", "sudo", "exec", "nohup", "time"];

/// Reads the text of a script, or of one command.
pub(super) fn read(text: &str) -> Source {
    let mut source = Source::default();
    for (index, content) in text.split('\n').enumerate() {
        if content.ends_with('\r') && concerns_nccl(content) {
            source.error(
                index + 1,
                None,
                "the line ends with a carriage return, which becomes part of the value; line ends must be LF",
                None,
            );
        }
    }
    let (commands, open_quote) = commands(text);
    if let Some(line) = open_quote {
        source.error(line, None, "a quote that begins here is never closed", None);
    }
    let exports_all = commands.iter().any(|command| {
        command.first().is_some_and(|word| word.text == "set")
            && command.iter().any(|word| matches!(word.text.as_str(), "-a" | "allexport" | "-ae" | "-ea"))
    });
    let exported: BTreeSet<&str> = commands
        .iter()
        .filter(|command| exports(command))
        .flat_map(|command| command[1..].iter().map(|word| word.text.as_str()))
        .collect();
    for (number, command) in commands.iter().enumerate() {
        let mut words = command.as_slice();
        while let [first, rest @ ..] = words
            && KEYWORDS.contains(&first.text.as_str())
        {
            words = rest;
        }
        read_command(&mut source, words, number + 1, &|name| exports_all || exported.contains(name));
    }
    source
}

fn read_command(source: &mut Source, words: &[Word], scope: usize, is_exported: &dyn Fn(&str) -> bool) {
    let Some(first) = words.first() else { return };
    match first.text.as_str() {
        "export" | "declare" | "typeset" | "readonly" => {
            let exports = exports(words);
            return read_export(source, &words[1..], &|name| exports || is_exported(name));
        }
        "setenv" => {
            if let [_, name, value, ..] = words {
                source.set(name.line, &name.text, known(value, &value.text), 0);
            }
            return;
        }
        _ => {}
    }
    let mut rest = words;
    while let [word, others @ ..] = rest
        && PREFIXES.contains(&word.text.as_str())
    {
        rest = others;
    }
    let prefixed = rest.len() < words.len();
    let assignments = rest.iter().take_while(|word| split(word).is_some()).count();
    let stands_alone = assignments == rest.len() && !prefixed;
    for word in &rest[..assignments] {
        let Some((name, value)) = split(word) else { continue };
        if stands_alone && !is_exported(name) {
            unexported(source, word, name);
            continue;
        }
        source.set(word.line, name, known(word, value), if stands_alone { 0 } else { scope });
    }
    let rest = &rest[assignments..];
    if let [name, sign, ..] = rest
        && sign.text.starts_with('=')
        && concerns_nccl(&name.text)
        && is_name(&name.text)
    {
        return blanks_around(source, name);
    }
    read_options(source, rest, scope);
}

fn blanks_around(source: &mut Source, name: &Word) {
    let message = format!("there are blanks around the \"=\", so the shell does not set {}", name.text);
    source.error(name.line, Some(&name.text), message, Some(format!("export {}=...", name.text)));
}

/// Whether a command exports what it names: `declare`, `typeset` and `readonly` set a variable of the shell alone,
/// unless an option of the first two says more.
fn exports(words: &[Word]) -> bool {
    let has_x = || {
        let options = words[1..].iter().take_while(|word| word.text.starts_with('-'));
        options.into_iter().any(|word| !word.text.starts_with("--") && word.text.contains('x'))
    };
    match words.first().map(|word| word.text.as_str()) {
        Some("export") => true,
        Some("declare" | "typeset") => has_x(),
        _ => false,
    }
}

fn unexported(source: &mut Source, word: &Word, name: &str) {
    if concerns_nccl(name) {
        source.warning(
            word.line,
            Some(name),
            format!("{name} is set and not exported, so no program sees it"),
            Some(format!("export {}", clip(&word.text))),
        );
    }
}

fn read_export(source: &mut Source, words: &[Word], is_exported: &dyn Fn(&str) -> bool) {
    let mut last: Option<&str> = None;
    let mut index = 0;
    while let Some(word) = words.get(index) {
        index += 1;
        if word.text.starts_with('-') {
            continue;
        }
        if let Some((name, value)) = split(word) {
            if is_exported(name) {
                source.set(word.line, name, known(word, value), 0);
            } else {
                unexported(source, word, name);
            }
            last = Some(name);
        } else if words.get(index).is_some_and(|next| next.text.starts_with('=')) && concerns_nccl(&word.text) {
            return blanks_around(source, word);
        } else if !is_name(&word.text)
            && !word.is_open
            && let Some(name) = last
            && concerns_nccl(name)
        {
            source.error(
                word.line,
                Some(name),
                format!("the value of {name} ends at the blank before {:?}; quote the whole of it", clip(&word.text)),
                None,
            );
            return;
        }
    }
}

/// Commands whose `-e` means something else.
const OF_TEXT: [&str; 8] = ["echo", "printf", "grep", "egrep", "rg", "sed", "perl", "awk"];

/// Commands that start a process which sees nothing of their own environment.
const CONTAINERS: [&str; 3] = ["docker", "podman", "nerdctl"];

/// Options by which launchers hand variables on: `mpirun -x`, `docker run -e`, `srun --export`.
fn read_options(source: &mut Source, words: &[Word], scope: usize) {
    if words.first().is_some_and(|word| OF_TEXT.contains(&word.text.as_str())) {
        return;
    }
    let is_container = words.first().is_some_and(|word| CONTAINERS.contains(&word.text.as_str()));
    let set = |source: &mut Source, line, name: &str, value| {
        if is_container {
            source.set_in_container(line, name, value, scope);
        } else {
            source.set(line, name, value, scope);
        }
    };
    for (index, word) in words.iter().enumerate() {
        let next = words.get(index + 1);
        match word.text.as_str() {
            "-x" | "-e" | "--env" => {
                if let Some(next) = next
                    && let Some((name, value)) = split(next)
                {
                    set(source, next.line, name, known(next, value));
                }
            }
            "--export" => {
                if let Some(next) = next {
                    read_export_list(source, next, &next.text, scope);
                }
            }
            text => {
                if let Some(list) = text.strip_prefix("--export=") {
                    read_export_list(source, word, list, scope);
                } else if let Some((name, value)) =
                    text.strip_prefix("--env=").and_then(|assignment| assignment.split_once('='))
                    && is_name(name)
                {
                    set(source, word.line, name, known(word, value));
                }
            }
        }
    }
}

fn read_export_list(source: &mut Source, word: &Word, list: &str, scope: usize) {
    let mut last: Option<&str> = None;
    for part in list.split(',') {
        match part.split_once('=') {
            Some((name, value)) if is_name(name) => {
                source.set(word.line, name, known(word, value), scope);
                last = Some(name);
            }
            _ => {
                if let Some(name) = last.filter(|name| concerns_nccl(name))
                    && !is_exportable(part)
                {
                    source.error(
                        word.line,
                        Some(name),
                        format!("Slurm ends the value of {name} at the comma before {:?}", clip(part)),
                        Some(format!("export {name} before srun, and use --export=ALL")),
                    );
                }
            }
        }
    }
}

/// A name that one may really want to pass on: names of variables are in capitals.
fn is_exportable(part: &str) -> bool {
    is_name(part) && part.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

/// NAME=VALUE, where a word is that.
pub(super) fn split(word: &Word) -> Option<(&str, &str)> {
    word.text.split_once('=').filter(|(name, _)| is_name(name))
}

fn known(word: &Word, value: &str) -> Option<String> {
    (!word.is_open).then(|| value.to_owned())
}
