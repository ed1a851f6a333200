//! Units of systemd: `Environment=` of the section `[Service]`, and variables in its commands.

use super::{Source, clip, concerns_nccl, is_name};

/// Reads a unit, a drop-in, or what `systemctl cat` prints.
pub(super) fn read(text: &str) -> Source {
    let mut source = Source::default();
    let mut section = String::new();
    let mut lines = text.split('\n').enumerate().map(|(index, content)| (index + 1, content)).peekable();
    while let Some((first, content)) = lines.next() {
        let content = content.trim_end_matches('\r');
        let trimmed = content.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name.clone_into(&mut section);
            continue;
        }
        // A backslash at its end continues a line, with a blank in its place; comments in between are skipped.
        let mut pieces = vec![(first, trimmed.to_owned())];
        while pieces.last_mut().is_some_and(|(_, piece)| piece.ends_with('\\') && piece.pop().is_some()) {
            let next = lines.by_ref().find(|(_, content)| !content.trim_start().starts_with(['#', ';']));
            let Some((line, content)) = next else { break };
            pieces.push((line, content.trim().to_owned()));
        }
        let Some((key, rest)) = pieces[0].1.split_once('=') else { continue };
        let (key, rest) = (key.trim().to_owned(), rest.trim_start().to_owned());
        pieces[0].1 = rest;
        match key.as_str() {
            // An empty one takes back what stood before it, as drop-ins do.
            "Environment" if section == "Service" && pieces.iter().all(|(_, piece)| piece.is_empty()) => {
                source.assignments.clear();
            }
            "Environment" if section == "Service" => read_environment(&mut source, &pieces),
            // These start processes, too, but never a server.
            "Environment" if matches!(section.as_str(), "Socket" | "Mount" | "Swap") => {}
            "Environment" if pieces.iter().any(|(_, piece)| concerns_nccl(piece)) => {
                let message = format!("Environment= stands in [{}]; only [Service] knows it", clip(&section));
                source.error(first, None, message, None);
            }
            _ if key.starts_with("Exec") => read_command(&mut source, &pieces),
            _ if is_name(&key) && key.starts_with("NCCL_") => {
                source.error(
                    first,
                    Some(&key),
                    format!("{key} is no setting of a unit, so systemd ignores the line"),
                    Some(format!("Environment={key}={}", pieces[0].1)),
                );
            }
            _ => {}
        }
    }
    source
}

/// Words with their lines; nothing where a quote is not closed.
fn words(pieces: &[(usize, String)]) -> Option<Vec<(usize, String)>> {
    let mut words: Vec<(usize, String)> = Vec::new();
    let mut word: Option<(usize, String)> = None;
    let mut quote = None;
    for (line, piece) in pieces {
        let mut signs = piece.chars();
        while let Some(sign) = signs.next() {
            match quote {
                Some(open) if sign == open => quote = None,
                None if sign == '"' || sign == '\'' => {
                    quote = Some(sign);
                    word.get_or_insert_with(|| (*line, String::new()));
                }
                None if sign == ' ' || sign == '\t' => words.extend(word.take()),
                _ if sign == '\\' && quote != Some('\'') => {
                    let (_, text) = word.get_or_insert_with(|| (*line, String::new()));
                    text.extend(signs.next());
                }
                _ => word.get_or_insert_with(|| (*line, String::new())).1.push(sign),
            }
        }
        if quote.is_none() {
            words.extend(word.take());
        } else if let Some((_, text)) = word.as_mut() {
            text.push(' ');
        }
    }
    words.extend(word.take());
    quote.is_none().then_some(words)
}

fn read_environment(source: &mut Source, pieces: &[(usize, String)]) {
    let concerned = pieces.iter().any(|(_, piece)| concerns_nccl(piece));
    let Some(words) = words(pieces) else {
        if concerned {
            source.error(
                pieces[0].0,
                None,
                "a quote that begins here is never closed, so systemd ignores the line",
                None,
            );
        }
        return;
    };
    let mut last: Option<String> = None;
    for (line, word) in words {
        match word.split_once('=') {
            Some((name, value)) if is_name(name) => {
                if concerns_nccl(name) {
                    look_at_value(source, line, name, value);
                }
                let value = value.replace("%%", "%");
                source.set(line, name, Some(value), 0);
                last = Some(name.to_owned());
            }
            _ if !concerned => {}
            _ if word == "export" => {
                source.error(line, None, "`export` is shell syntax: systemd passes over the word", None);
            }
            _ if word.starts_with('#') => {
                source.error(line, last.as_deref(), "a comment stands on a line of its own in a unit", None);
                return;
            }
            _ => {
                let name = last.clone().unwrap_or_default();
                source.error(
                    line,
                    last.as_deref(),
                    format!("the value of {name} ends at the blank before {:?}", clip(&word)),
                    Some(format!("Environment=\"{name}=...\"")),
                );
                return;
            }
        }
    }
}

fn look_at_value(source: &mut Source, line: usize, name: &str, value: &str) {
    if value.contains('$') {
        source.error(line, Some(name), "systemd does not expand $ in Environment=", None);
    }
    let plain = value.replace("%%", "");
    if plain.contains('%') {
        source.error(line, Some(name), "% begins a specifier of systemd; a plain % is written %%", None);
    }
}

/// `env NAME=VALUE` in a command.
fn read_command(source: &mut Source, pieces: &[(usize, String)]) {
    let Some(words) = words(pieces) else { return };
    let mut words = words.into_iter();
    let begins_with_env = words
        .next()
        .is_some_and(|(_, word)| word.trim_start_matches(['-', '@', '+', '!', ':']).rsplit('/').next() == Some("env"));
    if !begins_with_env {
        return;
    }
    for (line, word) in words {
        match word.split_once('=') {
            Some((name, value)) if is_name(name) => {
                let known = !value.contains('$');
                source.set(line, name, known.then(|| value.to_owned()), 0);
            }
            _ if word.starts_with('-') => {}
            _ => return,
        }
    }
}
