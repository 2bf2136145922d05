// Reads Grafana dashboards as Grafana's own types have them: an unknown or missing field is an error. What these types do not know
// (widths beyond 24 columns, kinds of panels) is checked by `xtask/src/dashboards.rs`.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	plugins.RegisterDefaultPlugins()
	wrong := false
	for _, file := range os.Args[1:] {
		if err := check(file); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", file, err)
			wrong = true
		}
	}
	if wrong {
		os.Exit(1)
	}
}

func check(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var read dashboard.Dashboard
	if err := failed(read.UnmarshalJSONStrict(text)); err != nil {
		return err
	}
	if len(read.Panels) == 0 {
		return errors.New("no panels")
	}
	return failed(read.Validate())
}

// The types return an empty list of errors where there is none.
func failed(err error) error {
	var all cog.BuildErrors
	if errors.As(err, &all) && len(all) == 0 {
		return nil
	}
	return err
}
