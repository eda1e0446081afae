//! Named values for a run, as text: what the starting process tells the ranks.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Named values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params(BTreeMap<String, String>);

impl Params {
    /// None.
    pub fn new() -> Params {
        Params::default()
    }

    /// Adds a value. Line breaks in it become spaces.
    pub fn set(&mut self, name: &str, value: impl ToString) -> &mut Params {
        self.0.insert(
            name.to_string(),
            value.to_string().replace(['\n', '\r'], " "),
        );
        self
    }

    /// Adds a value.
    pub fn with(mut self, name: &str, value: impl ToString) -> Params {
        self.set(name, value);
        self
    }

    /// A value that may be missing.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// A value that must be there and be of the type.
    pub fn get<T: FromStr>(&self, name: &str) -> Result<T> {
        let text = self
            .text(name)
            .ok_or_else(|| Error::new(format!("the run's parameters lack {name}")))?;
        text.parse()
            .map_err(|_| Error::new(format!("the run's parameter {name}={text} is no use")))
    }

    /// As lines.
    pub fn encode(&self) -> String {
        self.0.iter().map(|(k, v)| format!("{k}={v}\n")).collect()
    }

    /// From lines.
    pub fn decode(text: &str) -> Params {
        Params(
            text.lines()
                .filter_map(|l| l.split_once('='))
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_back() {
        let p = Params::new()
            .with("a", 1)
            .with("path", "/x=y z")
            .with("text", "two\nlines");
        let q = Params::decode(&p.encode());
        assert_eq!(q.get::<u32>("a").unwrap(), 1);
        assert_eq!(q.text("path"), Some("/x=y z"));
        assert_eq!(q.text("text"), Some("two lines"));
        assert!(q.get::<u32>("path").is_err());
        assert!(q.get::<u32>("none").is_err());
    }
}
