// manifests renders Kubernetes manifests and checks them the way an API server does, without one: what
// kustomize builds is decoded strictly, defaulted and validated by Kubernetes' own code, and custom resources by
// the schemas and rules of their CRDs.
//
//	manifests [-crds DIR]... [-test-driver FILE] [-chart CASES] PATH...
//
// A PATH is a kustomization directory or a file of YAML documents; the FILE describes a driver to Kubernetes'
// storage tests; CASES says what a Helm chart is to render, and which manifests that is the same as (chart.yaml). All objects go to standard output as one JSON
// list of {"source", "object"}, for further checks; every fault goes to standard error, and the exit code is 1.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// found is an object and the path that it came from.
type found struct {
	Source string         `json:"source"`
	Object map[string]any `json:"object"`
}

type paths []string

func (p *paths) String() string         { return strings.Join(*p, ",") }
func (p *paths) Set(value string) error { *p = append(*p, value); return nil }

func main() {
	var crdDirs paths
	flag.Var(&crdDirs, "crds", "directory of CustomResourceDefinitions; may be given more than once")
	driver := flag.String("test-driver", "", "file that e2e.test -storage.testdriver is to read")
	chart := flag.String("chart", "", "file that says what a Helm chart is to render")
	flag.Parse()
	if flag.NArg() == 0 && *chart == "" {
		fmt.Fprintln(os.Stderr, "manifests: name a kustomization directory or a YAML file")
		os.Exit(2)
	}
	if err := run(crdDirs, *driver, *chart, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(crdDirs []string, driver, chart string, arguments []string) error {
	customs, err := loadCRDs(crdDirs)
	if err != nil {
		return err
	}
	all := []found{}
	var faults []error
	if driver != "" {
		if err := checkTestDriver(driver); err != nil {
			faults = append(faults, err)
		}
	}
	if chart != "" {
		faults = append(faults, checkChart(customs, chart)...)
	}
	for _, path := range arguments {
		text, err := render(path)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", path, err))
			continue
		}
		objects, wrong := parse(customs, path, text)
		all = append(all, objects...)
		faults = append(faults, wrong...)
	}
	if err := json.NewEncoder(os.Stdout).Encode(all); err != nil {
		return err
	}
	return errors.Join(faults...)
}

// parse gives the objects of a YAML stream, and what an API server would refuse in them.
func parse(customs customs, source string, text []byte) ([]found, []error) {
	documents, err := split(text)
	if err != nil {
		return nil, []error{fmt.Errorf("%s: %w", source, err)}
	}
	var all []found
	var faults []error
	for _, document := range documents {
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(document, &object.Object); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", source, err))
			continue
		}
		if object.Object == nil {
			continue
		}
		for _, fault := range customs.check(document, object) {
			faults = append(faults, fmt.Errorf("%s: %s %s: %w", source, object.GetKind(), object.GetName(), fault))
		}
		all = append(all, found{Source: source, Object: object.Object})
	}
	return all, faults
}

// render gives the YAML of a file, or what kustomize builds of a directory.
func render(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return os.ReadFile(path)
	}
	options := krusty.MakeDefaultOptions()
	options.LoadRestrictions = types.LoadRestrictionsRootOnly
	built, err := krusty.MakeKustomizer(options).Run(filesys.MakeFsOnDisk(), path)
	if err != nil {
		return nil, err
	}
	return built.AsYaml()
}

// split parts a stream into its documents.
func split(text []byte) ([][]byte, error) {
	var documents [][]byte
	reader := yaml.NewYAMLReader(newBufferedReader(text))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return nil, err
		}
		documents = append(documents, document)
	}
}

// yamlFiles lists the YAML files of a directory.
func yamlFiles(dir string) ([]string, error) {
	entries, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err == nil && len(entries) == 0 {
		err = fmt.Errorf("%s holds no YAML file", dir)
	}
	return entries, err
}
